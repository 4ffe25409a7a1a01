"""Block pool, lineage hashes, prefix index and the per-sequence block transaction. Pure Python."""
