"""One published version: an index that says everything, and parts that hold compressed chunks.

    <id>/part-00000 ...     zstd frames one after the other
    <id>/index              line 1: digest of the rest; then JSON. Written after all parts
    latest                  line 1: digest of the rest; then the id. Replaced after the index

An id is unique for ever (`<version>-<random>`): a run that resumes and trains version 7 again publishes another 7.
A delta names the id of its base, so deltas can neither be skipped nor reordered unnoticed.
"""

from __future__ import annotations

import msgspec

from miles_contracts import TensorSpec, WeightManifest, WeightUpdateError, digest
from miles_sync.disk.codec import Encoding
from miles_sync.disk.store import Store

FORMAT = 1
LATEST = "latest"


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    """The change of consecutive bytes of one tensor; bytes without a chunk are unchanged.

    Attributes:
        name: the tensor.
        start, length: which bytes of it.
        encoding: how the payload is read.
        part: number of the part that holds the payload.
        offset, num_bytes: where in the part.
        digest: of the payload as it lies there.
    """

    name: str
    start: int
    length: int
    encoding: Encoding
    part: int
    offset: int
    num_bytes: int
    digest: str


class Publication(msgspec.Struct, frozen=True, kw_only=True):
    """The index of one version.

    Attributes:
        id: its name.
        manifest: the final state, every tensor with its digest.
        base: id that the chunks are differences to, None for a full publication.
        chunks: what to apply.
        num_bytes: of all parts.
        format: this code reads 1.
    """

    id: str
    manifest: WeightManifest
    base: str | None
    chunks: tuple[Chunk, ...]
    num_bytes: int
    format: int = FORMAT

    @property
    def version(self) -> int:
        """Number of optimiser updates."""
        return self.manifest.version

    @property
    def specs(self) -> dict[str, TensorSpec]:
        """Tensors by name."""
        return {spec.name: spec for spec in self.manifest.tensors}


def part_key(publication_id: str, part: int) -> str:
    """Key of a part."""
    return f"{publication_id}/part-{part:05d}"


def index_key(publication_id: str) -> str:
    """Key of an index."""
    return f"{publication_id}/index"


def write_index(store: Store, publication: Publication) -> None:
    """Publish: the parts must be in the store already."""
    store.put(index_key(publication.id), _sealed(msgspec.json.encode(publication)))


def write_latest(store: Store, publication_id: str) -> None:
    """Point readers that ask for the newest version to this one."""
    store.put(LATEST, _sealed(publication_id.encode()))


def read_latest(store: Store) -> str | None:
    """Id of the newest publication, None when nothing was published.

    Raises:
        WeightUpdateError: the pointer is torn or damaged.
    """
    try:
        return _unsealed(store.read(LATEST), LATEST).decode()
    except FileNotFoundError:
        return None


def read_index(store: Store, publication_id: str) -> Publication:
    """The index of a publication.

    Raises:
        WeightUpdateError: it is missing, torn, damaged, of another publication or of a newer format.
    """
    key = index_key(publication_id)
    try:
        body = _unsealed(store.read(key), key)
    except FileNotFoundError as error:
        raise WeightUpdateError(f"{key} is missing: not published, or already collected") from error
    try:
        publication = msgspec.json.decode(body, type=Publication)
    except (msgspec.MsgspecError, ValueError) as error:
        raise WeightUpdateError(f"{key} is not an index that this version reads: {error}") from error
    if publication.format > FORMAT:
        raise WeightUpdateError(f"{key} has format {publication.format}, this code reads {FORMAT}; upgrade miles-sync")
    if publication.id != publication_id:
        raise WeightUpdateError(f"{key} is the index of {publication.id}: files were mixed up")
    return publication


def read_payload(store: Store, publication_id: str, chunk: Chunk) -> bytes:
    """Compressed payload of one chunk.

    Raises:
        WeightUpdateError: its part is missing, torn or damaged; names part and tensor.
    """
    key = part_key(publication_id, chunk.part)
    try:
        payload = store.read(key, chunk.offset, chunk.num_bytes)
    except FileNotFoundError as error:
        raise WeightUpdateError(f"{key} is missing", tensor=chunk.name) from error
    if len(payload) != chunk.num_bytes:
        short = f"{key} is torn: {len(payload)} of {chunk.num_bytes} bytes at {chunk.offset}"
        raise WeightUpdateError(short, tensor=chunk.name)
    if digest(payload) != chunk.digest:
        raise WeightUpdateError(f"{key} is damaged at byte {chunk.offset}", tensor=chunk.name)
    return payload


def chain(store: Store, target: str, have: str | None) -> list[Publication]:
    """What to apply, oldest first, to get from publication `have` to `target`; begins with a full one if it must.

    Raises:
        WeightUpdateError: an index in between is missing or damaged, or the bases go in a circle.
    """
    links: list[Publication] = []
    wanted: str | None = target
    while wanted is not None and wanted != have:
        if any(link.id == wanted for link in links):
            raise WeightUpdateError(f"publication {wanted} is its own base: files were mixed up")
        links.append(read_index(store, wanted))
        wanted = links[-1].base
    return links[::-1]


def _sealed(body: bytes) -> list[bytes]:
    return [digest(body).encode() + b"\n", body]


def _unsealed(data: bytes, key: str) -> bytes:
    stated, newline, body = data.partition(b"\n")
    if not newline or digest(body).encode() != stated:
        raise WeightUpdateError(f"{key} is torn or damaged: its digest does not match")
    return body
