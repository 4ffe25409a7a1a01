"""Stage 2: from downloads to clean, deduplicated documents.

Three streams are written as JSON lines (``package``, ``path``, ``text``): ``code`` (Python source),
``prose`` (documentation) and ``instruct`` (ChatML conversations, see ``instruct.py``), plus ``heldout``
(Python source of the packages that are never trained on). The rules, in order:

* licence: the wheel's declared licence must be permissive, or the whole package is dropped; a file that
  carries a copyleft notice of its own is dropped;
* kind: vendored copies, generated code, data tables, stubs, minified or non-English files are dropped;
* parse: a source file must parse with ``ast``;
* size: at most ``CODE_CAP_BYTES`` a package (``TEST_CAP_BYTES`` of them tests), chosen by file hash;
* duplicates: a file most of whose long lines were already seen is dropped, and so is a training file
  that shares a quarter of its long lines with the held-out packages.
"""

from __future__ import annotations

import argparse
import ast
import email.parser
import gzip
import hashlib
import json
import re
import string
import subprocess
import tempfile
import warnings
import zipfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import NamedTuple

from pretrain.common import RECIPE, load_packages
from pretrain.instruct import pairs_from_prose, pairs_from_source, write_conversations

CODE_CAP_BYTES = 2_200_000
TEST_CAP_BYTES = 350_000
PROSE_CAP_BYTES = 5_000_000

_PERMISSIVE = re.compile(
    r"\b(mit|bsd|apache|isc|psf|python software foundation|python-2\.0|unlicense|zlib|cc0|public domain|"
    r"zpl|zope public|hpnd|boost|bsl-1\.0|0bsd|postgresql|ncsa|artistic-2)\b|apache",
    re.I,
)
_COPYLEFT = re.compile(
    r"gpl|gnu (lesser|affero|general)|general public|mozilla|\bmpl|\bepl\b|eclipse|cc-by-(sa|nc)|sharealike|"
    r"non-?commercial|proprietary|commons clause|business source|busl|server side public|elastic",
    re.I,
)
_COPYLEFT_FILE = re.compile(
    r"general public license|\b[LA]?GPL(v?[23]|-)|Mozilla Public License|all rights reserved\. proprietary|"
    r"creativecommons\.org/licenses/by-(sa|nc)",
    re.I,
)
_VENDORED = re.compile(
    r"(^|/)(_?vendor(ed|s|_py\d*)?|_vendored_packages|third_?party|thirdparty|externals?|_?extern|deps|bundled|"
    r"site-packages|node_modules|typeshed|stubs?|_pb2|generated|_generated|gen|migrations|locales?|lang|"
    r"packages/urllib3|contrib/packages|[^/]*\.(dist-info|data))/",
    re.I,
)
_GENERATED = re.compile(
    r"auto-?generated|automatically generated|generated (by|from|using|with)|do not (edit|modify)|@generated",
    re.I,
)
_TEST = re.compile(
    r"(^|/)(tests?|testing|functional|unit|integration_tests)/|(^|/)(test_[^/]*|[^/]*_tests?|conftest)\.py$"
)
_LETTERS, _DIGITS = string.ascii_letters.encode(), string.digits.encode()
_LICENCE_WORDS = re.compile(r"licen[sc]e|copyright|\(c\)|all rights reserved", re.I)


@dataclass
class Source:
    """One row of the manifest: what was used of one package."""

    name: str
    version: str
    licence: str
    kind: str
    sha256: str
    kept_bytes: int = 0
    note: str = ""


class Document(NamedTuple):
    """A candidate document and the (user, assistant) pairs made from it."""

    path: str
    text: str
    pairs: list[tuple[str, str]]


@dataclass
class Extracted:
    """The candidate documents of one package, before deduplication across packages."""

    source: Source
    code: list[Document] = field(default_factory=list)
    prose: list[Document] = field(default_factory=list)


def licence_of(metadata: str) -> tuple[str, bool]:
    """The licence a wheel's METADATA declares, and whether it is permissive."""
    message = email.parser.HeaderParser().parsestr(metadata)
    classifiers = [c for c in message.get_all("Classifier") or [] if c.startswith("License ::")]
    expression = message.get("License-Expression") or ""
    free_text = (message.get("License") or "").strip().splitlines()
    named = (
        expression or "; ".join(c.rsplit(" :: ", 1)[-1] for c in classifiers) or " ".join(free_text[:3])[:160]
    )
    if named in ("OSI Approved", "") and free_text:
        named = " ".join(free_text[:3])[:160]
    if "OR" in expression.split():
        return named, bool(_PERMISSIVE.search(expression))
    return named, bool(_PERMISSIVE.search(named)) and not _COPYLEFT.search(named)


def strip_licence_header(text: str) -> str:
    """Drop a leading comment block that states a licence: the same few texts, thousands of times."""
    lines = text.split("\n")
    end = 0
    while end < len(lines) and (lines[end].startswith("#") or not lines[end].strip()):
        end += 1
    head = "\n".join(lines[:end])
    if end and _LICENCE_WORDS.search(head):
        kept = [line for line in lines[:2] if line.startswith("#!")]
        return "\n".join([*kept, *lines[end:]])
    return text


def source_document(path: str, raw: bytes) -> Document | None:
    """A Python file worth training on, or None."""
    if not 150 <= len(raw) <= 250_000:
        return None
    try:
        text = raw.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n").lstrip("\ufeff")
    except UnicodeDecodeError:
        return None
    head = text[:3000]
    if _COPYLEFT_FILE.search(head) or _GENERATED.search(text[:800]) or "\0" in text:
        return None
    lines = text.split("\n")
    longest = max(map(len, lines))
    letters = len(raw) - len(raw.translate(None, _LETTERS))
    digits = len(raw) - len(raw.translate(None, _DIGITS))
    if (
        longest > 500
        or len(text) / len(lines) > 75
        or digits > 0.12 * len(text)
        or letters < 0.35 * len(text)
    ):
        return None
    if len(raw) - len(text) > 0.02 * len(text):  # mostly not English
        return None
    text = strip_licence_header(text)
    text = "\n".join(line.rstrip() for line in text.split("\n")).strip("\n") + "\n"
    if len(text) < 120:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return Document(path, text, list(pairs_from_source(text, tree)))


def prose_document(path: str, text: str) -> Document | None:
    """A documentation file worth training on, or None."""
    text = text.replace("\r\n", "\n").lstrip("\ufeff")
    if len(text) < 400 or _COPYLEFT_FILE.search(text[:2000]):
        return None
    raw = text.encode("utf-8", "ignore")
    encoded = len(raw)
    letters = encoded - len(raw.translate(None, _LETTERS))
    digits = encoded - len(raw.translate(None, _DIGITS))
    if encoded > 1.03 * len(text) or letters < 0.5 * len(text) or digits > 0.1 * len(text):
        return None
    lines = [line.rstrip() for line in text.split("\n")]
    lines = [line for line in lines if len(line) <= 2000]
    text = re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip("\n") + "\n"
    return Document(path, text, list(pairs_from_prose(text)))


class _TextOf(HTMLParser):
    """HTML to plain text: headings as ``#``, items as ``-``, preformatted text as it is."""

    _SKIP = frozenset({"script", "style", "nav", "header", "footer", "head", "button", "svg", "form"})
    _BLOCK = frozenset(
        {"p", "div", "section", "tr", "dl", "dt", "dd", "ul", "ol", "table", "blockquote", "pre"}
    )

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self._skip = 0
        self._pre = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in self._SKIP:
            self._skip += 1
        elif tag == "pre":
            self._pre += 1
            self.parts.append("\n\n")
        elif tag in self._BLOCK:
            self.parts.append("\n\n" if tag in ("p", "dl", "table", "ul", "ol", "section") else "\n")
        elif tag == "br":
            self.parts.append("\n")
        elif tag == "li":
            self.parts.append("\n- ")
        elif tag in ("td", "th"):
            self.parts.append("  ")
        elif len(tag) == 2 and tag[0] == "h" and tag[1].isdigit():
            self.parts.append("\n\n" + "#" * int(tag[1]) + " ")

    def handle_endtag(self, tag: str) -> None:
        if tag in self._SKIP:
            self._skip = max(0, self._skip - 1)
        elif tag == "pre":
            self._pre = max(0, self._pre - 1)
            self.parts.append("\n\n")
        elif tag in self._BLOCK or (len(tag) == 2 and tag[0] == "h" and tag[1].isdigit()):
            self.parts.append("\n")

    def handle_data(self, data: str) -> None:
        if self._skip:
            return
        self.parts.append(data if self._pre else re.sub(r"\s+", " ", data))


def html_to_text(html: str) -> str:
    """The readable text of an HTML page's main part."""
    for start in ('<div class="body"', '<div role="main"', "<main", "<article", "<body"):
        at = html.find(start)
        if at >= 0:
            html = html[at:]
            break
    parser = _TextOf()
    parser.feed(html)
    text = "".join(parser.parts).replace("\u00b6", "").replace("\u2019", "'").replace("\u00a0", " ")
    text = text.replace("\u201c", '"').replace("\u201d", '"').replace("\u2014", "-").replace("\u2013", "-")
    return re.sub(r"[ \t]+\n", "\n", re.sub(r"\n[ ]+(?=[#A-Z])", "\n", text))


def roff_to_text(text: str) -> str:
    """A rough plain text of a manual page (man or mdoc macros)."""
    out: list[str] = []
    for line in text.split("\n"):
        if line.startswith(('.\\"', "'\\\"", ".TH", ".Dd", ".Os", ".ie", ".el", ".if", ".ds", ".nr", ".de")):
            continue
        line = (
            re.sub(r"\\f[A-Z]|\\f\([A-Z]{2}|\\&|\\s[-+]?\d", "", line)
            .replace("\\-", "-")
            .replace("\\e", "\\")
        )
        line = line.replace("\\(aq", "'").replace("\\(lq", '"').replace("\\(rq", '"').replace("\\(em", "-")
        if line.startswith((".SH", ".Sh", ".SS", ".Ss")):
            out.append("\n\n# " + line[3:].strip().strip('"') + "\n")
        elif line.startswith((".PP", ".Pp", ".LP", ".TP", ".IP", ".sp", ".It")):
            out.append("\n\n" + line[4:].strip().strip('"') + (" " if line[4:].strip() else ""))
        elif line.startswith("."):
            words = line.split(None, 1)
            out.append(words[1].strip('"') + " " if len(words) > 1 else "")
        else:
            out.append(line + " " if not line.startswith((" ", "\t")) else "\n" + line)
    return re.sub(r" +\n", "\n", "".join(out))


def extract_wheel(path: Path, kind: str) -> Extracted:
    """Candidate documents of one wheel; none when its licence is not permissive."""
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    name, version = path.name.split("-")[:2]
    out = Extracted(Source(name, version, "", kind, digest))
    with zipfile.ZipFile(path) as archive:
        members = archive.namelist()
        metadata = next((m for m in members if re.fullmatch(r"[^/]+\.dist-info/METADATA", m)), None)
        if metadata is None:
            out.source.note = "no metadata"
            return out
        text = archive.read(metadata).decode("utf-8", "replace")
        out.source.licence, permissive = licence_of(text)
        if not permissive:
            out.source.note = "dropped: licence"
            return out
        body = text.split("\n\n", 1)
        if kind != "heldout" and len(body) == 2 and (readme := prose_document("README", _readme(body[1]))):
            out.prose.append(readme)
        code_left, test_left, prose_left = CODE_CAP_BYTES, TEST_CAP_BYTES, PROSE_CAP_BYTES // 4
        members.sort(key=lambda m: hashlib.md5(m.encode()).digest())
        for member in members:
            if _VENDORED.search(member) or member.endswith(("_pb2.py", "_pb2_grpc.py")):
                continue
            if member.endswith(".py"):
                is_test = bool(_TEST.search(member))
                if code_left <= 0 or (is_test and (test_left <= 0 or kind == "heldout")):
                    continue
                source = source_document(member, archive.read(member))
                if source is None:
                    continue
                code_left -= len(source.text)
                test_left -= len(source.text) if is_test else 0
                out.code.append(source)
            elif member.endswith((".rst", ".md")) and prose_left > 0 and kind != "heldout":
                prose = prose_document(member, archive.read(member).decode("utf-8", "replace"))
                if prose:
                    prose_left -= len(prose.text)
                    out.prose.append(prose)
    return out


def _readme(text: str) -> str:
    """A package description without badges, images and raw HTML."""
    lines = [
        line
        for line in text.split("\n")
        if not re.search(r"!\[|<img|</?[a-z]+[ >]|\.\. image|:target:|:alt:|shields\.io", line)
    ]
    return "\n".join(lines)


def extract_debian(path: Path, licence: str) -> Extracted:
    """Candidate documents of one Debian documentation (or Python library) package."""
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    name, version = path.name.split("_")[:2]
    out = Extracted(Source(name, version.replace("%3a", ":"), licence, "docs", digest))
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        subprocess.run(["dpkg-deb", "-x", str(path), scratch], check=True)
        files = [p for p in root.rglob("*") if p.is_file() and not p.is_symlink()]
        files.sort(key=lambda p: hashlib.md5(str(p.relative_to(root)).encode()).digest())
        if any(p.suffix == ".py" and "usr/lib/python3" in str(p) for p in files):
            out.source.kind = "code"
            left = 3 * CODE_CAP_BYTES
            for p in files:
                relative = str(p.relative_to(root))
                if (
                    p.suffix != ".py"
                    or left <= 0
                    or re.search(r"/(lib2to3/tests/data|encodings)/|pydoc_data|_vendored", relative)
                ):
                    continue
                if _TEST.search(relative) and left < 2 * CODE_CAP_BYTES:
                    continue
                source = source_document(relative, p.read_bytes())
                if source is None:
                    continue
                left -= len(source.text)
                out.code.append(source)
            return out
        sources = [p for p in files if "_sources" in p.parts and p.suffix in (".txt", ".rst")]
        left = PROSE_CAP_BYTES
        for p in sources or files:
            relative = str(p.relative_to(root))
            if left <= 0:
                break
            if re.search(
                r"_modules/|genindex|py-modindex|searchindex|/search\.|/copyright$|changelog|/src/|_static/|index-[A-Z]|/all\.html|doc-index",
                relative,
            ):
                continue
            if p.stat().st_size > 1_500_000:
                continue
            raw = p.read_bytes()
            if p.name.endswith(".gz"):
                raw = gzip.decompress(raw)
            text = raw.decode("utf-8", "replace")
            stem = p.name.removesuffix(".gz")
            if stem.endswith((".html", ".htm", ".xhtml")):
                text = html_to_text(text)
            elif "/man/" in relative:
                text = roff_to_text(text)
            elif not stem.endswith((".txt", ".rst", ".md")):
                continue
            prose = prose_document(relative, text)
            if prose:
                left -= len(prose.text)
                out.prose.append(prose)
    return out


class Deduplicator:
    """Near-duplicate detection by the share of a document's long lines that were seen before."""

    def __init__(self, min_len: int = 30) -> None:
        self._min_len = min_len
        self._seen: set[int] = set()

    def _hashes(self, text: str) -> list[int]:
        return [hash(line) for raw in text.split("\n") if len(line := raw.strip()) >= self._min_len]

    def share_seen(self, text: str) -> float:
        """Share of the long lines of ``text`` that were added before, 0..1 (0 without long lines)."""
        hashes = self._hashes(text)
        return sum(h in self._seen for h in hashes) / len(hashes) if hashes else 0.0

    def add(self, text: str) -> None:
        """Remember the long lines of ``text``."""
        self._seen.update(self._hashes(text))


def unseen_paragraphs(text: str, seen: set[int]) -> str:
    """``text`` without the paragraphs that occurred in an earlier document (menus, licences, notes)."""
    kept = []
    for paragraph in text.split("\n\n"):
        key = hash(paragraph.strip())
        if len(paragraph) >= 40:
            if key in seen:
                continue
            seen.add(key)
        kept.append(paragraph)
    return "\n\n".join(kept)


def _job(task: tuple[str, Path, str]) -> Extracted:
    form, path, extra = task
    try:
        return extract_debian(path, extra) if form == "debian" else extract_wheel(path, extra)
    except (zipfile.BadZipFile, subprocess.CalledProcessError, OSError) as error:
        return Extracted(Source(path.name, "", "", extra, "", note=f"dropped: {error}"))


def _tasks(downloads: Path) -> Iterator[tuple[str, Path, str]]:
    packages = load_packages()
    for path in sorted((downloads / "heldout").glob("*.whl")):
        yield "wheel", path, "heldout"
    order = {
        name.lower().replace("-", "_").replace(".", "_"): i for i, name in enumerate(packages.train_pypi)
    }

    def rank(path: Path) -> tuple[int, str]:
        return order.get(path.name.split("-")[0].lower().replace(".", "_"), len(order)), path.name

    for name, licence in packages.train_debian.items():
        for path in sorted((downloads / "debian").glob(f"{name}_*.deb")):
            yield "debian", path, licence
    for path in sorted((downloads / "pypi").glob("*.whl"), key=rank):
        yield "wheel", path, "code"


def run(downloads: Path, corpus: Path, workers: int) -> None:
    """Extract everything under ``downloads`` into ``corpus``."""
    corpus.mkdir(parents=True, exist_ok=True)
    heldout, code_seen = Deduplicator(), Deduplicator()
    paragraphs: set[int] = set()
    manifest: list[Source] = []
    totals = {"code": 0, "prose": 0, "heldout": 0}
    files = {name: (corpus / f"{name}.jsonl").open("w") for name in ("code", "prose", "heldout", "pairs")}

    def emit(stream: str, package: str, path: str, text: str) -> None:
        files[stream].write(json.dumps({"package": package, "path": path, "text": text}) + "\n")

    def consume(results: Iterable[Extracted]) -> None:
        for got in results:
            name = got.source.name
            for path, text, pairs in got.code:
                if got.source.kind == "heldout":
                    heldout.add(text)
                    emit("heldout", name, path, text)
                    totals["heldout"] += len(text)
                    got.source.kept_bytes += len(text)
                    continue
                if code_seen.share_seen(text) > 0.5 or heldout.share_seen(text) > 0.25:
                    continue
                code_seen.add(text)
                emit("code", name, path, text)
                totals["code"] += len(text)
                got.source.kept_bytes += len(text)
                for pair in pairs:
                    files["pairs"].write(json.dumps([name, *pair]) + "\n")
            for path, raw, pairs in got.prose:
                text = unseen_paragraphs(raw, paragraphs)
                if len(text) < 400 or heldout.share_seen(text) > 0.25:
                    continue
                emit("prose", name, path, text)
                totals["prose"] += len(text)
                got.source.kept_bytes += len(text)
                for pair in pairs:
                    files["pairs"].write(json.dumps([name, *pair]) + "\n")
            manifest.append(got.source)

    with ProcessPoolExecutor(workers) as pool:
        consume(pool.map(_job, _tasks(downloads), chunksize=1))
    for handle in files.values():
        handle.close()
    with (corpus / "pairs.jsonl").open() as rows, (corpus / "instruct.jsonl").open("w") as out:
        totals["instruct"] = write_conversations((json.loads(line) for line in rows), out)
    results = RECIPE / "results"
    results.mkdir(exist_ok=True)
    listed = [asdict(source) for source in manifest]
    (results / "manifest.json").write_text("[\n" + ",\n".join(json.dumps(row) for row in listed) + "\n]\n")
    print("extract: MB of text", {name: round(size / 1e6, 1) for name, size in totals.items()})


def main() -> None:
    """Command line of the stage."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    run(args.data / "downloads", args.data / "corpus", args.workers)


if __name__ == "__main__":
    main()
