"""The device step: slot state, row layout, the paged cache and the runner that launches a plan."""
