"""The bundle: a folder with a manifest, graphs, lookahead vectors and a tokenizer.

Owns the manifest's schema, the digests, opening with every check, and writing in one step.
It does not know what a graph computes.
"""

from __future__ import annotations

import ctypes
import errno
import glob
import json
import math
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from pydantic import (
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    ValidationInfo,
    field_serializer,
    field_validator,
    model_serializer,
    model_validator,
)

from la_runtime.contract import CONTRACT_MAJOR, CacheForm, Contract, KvOrder, RowPlaces
from la_runtime.digests import DigestCheck, FileEntry, Sha256, hash_file, recall_digest
from la_runtime.errors import (
    BundleError,
    BundleVersionError,
    DigestError,
    HostError,
    LookaheadError,
    UsageError,
)
from la_runtime.group_mask import UNTUNED, GroupMask
from la_runtime.plans import PLANS_FOLDER, PlanFacts
from la_runtime.records import Record, RelativePath
from la_runtime.step_times import StepTimes

__all__ = [
    "GRAPH_PATH",
    "LOOKAHEAD_PATH",
    "MANIFEST_NAME",
    "REPORTS_FOLDER",
    "SCHEMA_MAJOR",
    "SCHEMA_VERSION",
    "Bundle",
    "Certificate",
    "CheckResult",
    "GraphVariant",
    "LookaheadFacts",
    "Manifest",
    "ModelFacts",
    "PerplexityFacts",
    "RopeFacts",
    "TextPerplexity",
    "abandoned_bytes",
    "check_destination",
    "open_bundle",
    "read_manifest",
    "replace_manifest",
    "seal_bundle",
    "write_bundle",
]

SCHEMA_MAJOR: Final = 1
SCHEMA_VERSION: Final = "1.0"
MANIFEST_NAME: Final = "manifest.json"
GRAPH_PATH: Final = "onnx/model.onnx"
LOOKAHEAD_PATH: Final = "lookahead.safetensors"
REPORTS_FOLDER: Final = "reports"
_REPORTS: Final = f"{REPORTS_FOLDER}/"
_PLANS: Final = f"{PLANS_FOLDER}/"
_LOOKED_AT_S: Final = 0.01
_WORK_SUFFIX: Final = ".partial"
_MOST_VERSION_DIGITS: Final = 9
_AT_FDCWD: Final = -100
_RENAME_EXCHANGE: Final = 2
_DISK_ERRORS: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO})


class RopeFacts(Record):
    """Rotary embedding as exported: the variant, its base, and the position it is fixed for."""

    kind: str
    theta: float
    parameters: dict[str, float | int | str | bool | list[float]] = Field(default_factory=dict)


class ModelFacts(Record):
    """What the source model is.

    `merged_adapter` names the PEFT adapter whose changes are in the weights; `source_digest` is of
    both then.
    `source_quantization` names the format the weights were stored in when that format has lost
    precision (a GGUF type such as ``Q4_1``); ``none`` otherwise.
    """

    name: str
    family: str
    source: str
    revision: str
    source_quantization: str
    source_digest: str
    num_parameters: int = Field(ge=0)
    num_attention_heads: int = Field(ge=1)
    context: int = Field(ge=2)
    rope: RopeFacts
    sliding_window: int | None
    tied_embeddings: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    merged_adapter: str | None = None

    @model_serializer(mode="wrap")
    def _leave_out_what_is_not_given(self, serialize: SerializerFunctionWrapHandler) -> Any:
        """See `GraphVariant`."""
        facts = serialize(self)
        if self.merged_adapter is None:
            del facts["merged_adapter"]
        return facts


class GraphVariant(Record):
    """A graph with the same weights that serves one backend better than the portable one.

    `omits` names outputs of the contract that it does not have; the backend makes up for them.
    `kv_order`, `cache_form` and `row_places` are those of the portable graph where they are not
    given. A cache form that is given has no fixed capacity. One that is `tokens_only` has no
    adapter: it stands beside the backend's other variant, for passes without lookaheads.
    """

    path: RelativePath
    backend: str
    omits: tuple[str, ...]
    kv_order: KvOrder | None = None
    cache_form: CacheForm | None = None
    row_places: RowPlaces | None = None
    tokens_only: bool | None = None

    @model_validator(mode="after")
    def _check_places(self) -> GraphVariant:
        is_growing = self.cache_form is CacheForm.SCATTER
        if self.row_places is RowPlaces.CHOSEN and not is_growing:
            raise ValueError(
                f"row_places is {self.row_places} in cache form {self.cache_form}; only "
                f"{CacheForm.SCATTER} has places to choose"
            )
        return self

    def contract_of(self, portable: Contract) -> Contract:
        """The contract of this graph.

        Args:
            portable: the contract of the portable graph.
        """
        return replace(
            portable,
            kv_order=self.kv_order or portable.kv_order,
            cache_form=self.cache_form or portable.cache_form,
            row_places=self.row_places or portable.row_places,
            capacity=portable.capacity if self.cache_form is None else None,
        )

    @model_serializer(mode="wrap")
    def _leave_out_what_is_not_given(self, serialize: SerializerFunctionWrapHandler) -> Any:
        """Manifests from before there were such fields keep the hash of their facts."""
        return {name: value for name, value in serialize(self).items() if value is not None}


class LookaheadFacts(Record):
    """Where the lookahead vectors are and how they were made.

    `num_adapter_weights` counts the numbers that lookahead rows add to the model's; none where
    there are vectors alone.
    """

    path: RelativePath
    origin: str
    group_mask: GroupMask
    num_adapter_weights: int | None = Field(default=None, ge=1)

    @property
    def is_tuned(self) -> bool:
        """Whether they were taught."""
        return self.origin != UNTUNED

    @model_serializer(mode="wrap")
    def _leave_out_what_is_not_given(self, serialize: SerializerFunctionWrapHandler) -> Any:
        """Manifests from before there were adapters keep the hash of their facts."""
        return {name: value for name, value in serialize(self).items() if value is not None}


class CheckResult(Record):
    """One check made before the bundle was written: measured value against its bound."""

    name: str
    value: float
    bound: float
    detail: str = ""


class TextPerplexity(Record):
    """Perplexity of a bundle on one kind of text, beside its source's.

    `source_perplexity` is None where the source was not at hand.
    """

    text: str
    num_tokens: int = Field(ge=1)
    perplexity: float = Field(ge=1, allow_inf_nan=False)
    source_perplexity: float | None = Field(default=None, ge=1, allow_inf_nan=False)

    @property
    def ratio(self) -> float | None:
        """The bundle's perplexity by the source's."""
        return None if self.source_perplexity is None else self.perplexity / self.source_perplexity


class PerplexityFacts(Record):
    """How well a bundle foretells texts: every window of them is read from an empty cache.

    Args:
        utc: when it was measured.
        backend: what ran the graph.
        source: what the bundle was compared with; None for nothing.
        window: tokens of the longest window.
        own_written_by: precision of the bundle that wrote the model's own text.
        texts: a line for each kind.
    """

    utc: str
    backend: str
    source: str | None
    window: int = Field(ge=2)
    own_written_by: str
    texts: tuple[TextPerplexity, ...] = Field(min_length=1)

    @property
    def overall(self) -> TextPerplexity:
        """All texts as one."""
        num_tokens = sum(text.num_tokens for text in self.texts)

        def pool(values: Iterable[float]) -> float:
            pairs = zip(self.texts, values, strict=True)
            return math.exp(sum(t.num_tokens * math.log(v) for t, v in pairs) / num_tokens)

        of_source = [t.source_perplexity for t in self.texts if t.source_perplexity is not None]
        return TextPerplexity(
            text="all",
            num_tokens=num_tokens,
            perplexity=pool(text.perplexity for text in self.texts),
            source_perplexity=pool(of_source) if len(of_source) == len(self.texts) else None,
        )


class Certificate(Record):
    """What a full verification of this bundle found: nothing that failed.

    `certificate` writes it and compares it with a machine.

    Args:
        utc: when the verification ended.
        reference: what the bundle was compared with: ``torch``, the checkpoint in PyTorch, or
            ``self``, the bundle's own plain decoding.
        backend: what ran the graph.
        backend_version: of its library.
        processor: what it ran on.
        threads: of one pass; 0 if the library chose.
        epsilon: margin below which two tokens are a near-tie there.
        lookahead_lengths: the lengths k that were compared with plain decoding.
        digests: SHA-256 by path of what was verified: graphs, weights, lookahead vectors,
            tokenizer.
        facts_sha256: SHA-256 of the manifest's facts, see `certificate.hash_facts`.
        num_prompts: how many texts were compared, those that ship with the package among them.
        prompts_sha256: SHA-256 of those texts; None in certificates of before they were recorded.
        rungs: ``passed`` or ``skipped`` by the name of the rung.
        report: path of the report within the bundle.
    """

    utc: str
    reference: str
    backend: str
    backend_version: str
    processor: str
    threads: int = Field(ge=0)
    epsilon: float = Field(ge=0, allow_inf_nan=False)
    lookahead_lengths: tuple[int, ...]
    digests: dict[RelativePath, Sha256]
    facts_sha256: Sha256
    num_prompts: int = Field(default=0, ge=0)
    prompts_sha256: Sha256 | None = None
    rungs: dict[str, str]
    report: RelativePath


class Manifest(Record):
    """The bundle's manifest; unknown keys are refused."""

    schema_version: str
    contract: Contract
    model: ModelFacts
    precision: str
    lookahead_lengths: tuple[int, ...]
    graph: RelativePath
    variants: tuple[GraphVariant, ...] = ()
    plans: tuple[PlanFacts, ...] = ()
    lookahead: LookaheadFacts
    recipe: dict[str, str | int | float | bool | list[int] | list[str]]
    built_with: dict[str, str]
    created_utc: str
    checks: tuple[CheckResult, ...]
    files: dict[RelativePath, FileEntry]
    certificates: tuple[Certificate, ...] = ()
    perplexity: PerplexityFacts | None = None
    step_times: tuple[StepTimes, ...] = ()

    @field_serializer("contract", mode="wrap")
    def _leave_out_what_has_no_window(
        self, contract: Contract, serialize: SerializerFunctionWrapHandler
    ) -> Any:
        """See `GraphVariant`."""
        facts = serialize(contract)
        if contract.window is None:
            del facts["window"]
        return facts

    @field_validator("model")
    @classmethod
    def _check_token_ids(cls, model: ModelFacts, info: ValidationInfo) -> ModelFacts:
        contract = info.data.get("contract")
        vocab_size = contract.vocab_size if isinstance(contract, Contract) else math.inf
        for token_id in model.eos_token_ids:
            if not 0 <= token_id < vocab_size:
                raise ValueError(f"expected end tokens below {vocab_size}, got {token_id}")
        return model

    @field_validator("contract")
    @classmethod
    def _check_portable(cls, contract: Contract) -> Contract:
        is_in_place = contract.cache_form is CacheForm.SCATTER
        has_no_room = is_in_place and contract.capacity is None
        is_other = has_no_room or contract.row_places is RowPlaces.CHOSEN
        if is_other or contract.kv_order is not KvOrder.HEAD_MAJOR:
            raise ValueError(
                f"expected {KvOrder.HEAD_MAJOR} keys and values and, in cache form "
                f"{CacheForm.SCATTER}, a capacity: other forms are for variants of the graph"
            )
        return contract

    @field_validator("model")
    @classmethod
    def _check_capacity(cls, model: ModelFacts, info: ValidationInfo) -> ModelFacts:
        contract = info.data.get("contract")
        if isinstance(contract, Contract) and contract.capacity is not None:
            least = model.context + contract.k_max + 1
            if contract.capacity < least:
                raise ValueError(
                    f"expected a cache capacity of {least} or more behind a context of "
                    f"{model.context}, got {contract.capacity}"
                )
        return model

    @field_validator("plans")
    @classmethod
    def _check_plans(
        cls, plans: tuple[PlanFacts, ...], info: ValidationInfo
    ) -> tuple[PlanFacts, ...]:
        contract = info.data.get("contract")
        if isinstance(contract, Contract):
            for plan in plans:
                plan.check(contract)
        return plans

    @field_validator("lookahead_lengths")
    @classmethod
    def _check_lengths(cls, lengths: tuple[int, ...], info: ValidationInfo) -> tuple[int, ...]:
        contract = info.data.get("contract")
        k_max = contract.k_max if isinstance(contract, Contract) else math.inf
        ascends = all(one < other for one, other in pairwise(lengths))
        if not lengths or not ascends or lengths[0] < 0 or lengths[-1] > k_max:
            raise ValueError(
                f"expected one or more ascending lengths from 0 to {k_max}, got {list(lengths)}"
            )
        return lengths

    def variant_for(self, backend: str) -> GraphVariant | None:
        """The variant of the graph that serves every pass of a backend, if there is one."""
        found = (v for v in self.variants if v.backend == backend and not v.tokens_only)
        return next(found, None)

    def tokens_only_variant(self, backend: str) -> GraphVariant | None:
        """The one for its passes without lookaheads, if there is one."""
        found = (v for v in self.variants if v.backend == backend and v.tokens_only)
        return next(found, None)


class Bundle:
    """An opened bundle whose digests have been checked. Paths it gives out exist.

    Its folder holds no file that was not checked, but for `reports/`, which nothing loads.
    """

    def __init__(self, root: Path, manifest: Manifest) -> None:
        self.root = root
        self.manifest = manifest

    def path(self, relative: str) -> Path:
        """Absolute path of a file that the manifest lists.

        Raises:
            BundleError: the manifest does not list it.
        """
        if relative not in self.manifest.files:
            raise BundleError(
                f"bundle {self.root} has no file {relative!r} in its manifest; rebuild the bundle"
            )
        return self.root / relative

    def has(self, relative: str) -> bool:
        """Whether the manifest lists this file."""
        return relative in self.manifest.files


def open_bundle(
    path: str | os.PathLike[str],
    *,
    digests: DigestCheck = DigestCheck.FULL,
    check: Callable[[Manifest], None] | None = None,
) -> Bundle:
    """Open a bundle: schema, contract version, paths, strays, sizes and digests, in that order.

    Nothing but the manifest is parsed before every digest has been compared.

    Args:
        path: the bundle's folder.
        digests: how digests are checked.
        check: refuses a manifest by raising, before any digest is computed.

    Raises:
        UsageError: no folder there.
        BundleVersionError: written by a newer major version.
        BundleError: not a bundle, malformed, incomplete, unreadable, a path leaves the folder, or
            there are files that the manifest does not list.
        DigestError: a file's bytes changed.
    """
    root = Path(path)
    try:
        is_folder = root.is_dir()
    except OSError as error:
        raise UsageError(
            f"no bundle at {root}: {error.strerror or error}; give the folder of a bundle"
        ) from error
    if not is_folder:
        raise UsageError(
            f"no bundle at {root}: it is not a folder; make one with 'la-export build'"
        )
    try:
        manifest = read_manifest(root)
        if check is not None:
            check(manifest)
        _check_no_strays(root, manifest)
        for relative, entry in manifest.files.items():
            _check_file(root, relative, entry, digests)
    except OSError as error:
        place = "" if error.filename is None else f" at {os.fsdecode(error.filename)}"
        raise BundleError(
            f"bundle {root} cannot be read{place}: {error.strerror or error}; check its "
            "permissions and its disk, or copy it again"
        ) from error
    return Bundle(root, manifest)


def read_manifest(root: Path) -> Manifest:
    """A bundle's manifest as it says of itself; no file is compared with it.

    Raises:
        BundleVersionError: written by a newer major version.
        BundleError: there is none, or it is malformed.
        OSError: it cannot be read.
    """
    manifest_path = root / MANIFEST_NAME
    if not manifest_path.is_file():
        raise BundleError(
            f"{root} is not a bundle: it has no {MANIFEST_NAME}; make one with 'la-export build'"
        )
    try:
        record: Any = json.loads(manifest_path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise BundleError(
            f"{manifest_path} is not valid JSON ({error}); rebuild the bundle"
        ) from error
    _check_versions(manifest_path, record)
    try:
        manifest = Manifest.model_validate(record)
    except (ValidationError, LookaheadError) as error:
        raise BundleError(f"{manifest_path} is malformed: {_first_problem(error)}") from error
    variants = [variant.path for variant in manifest.variants]
    plans = [plan.path for plan in manifest.plans]
    for relative in (manifest.graph, *variants, *plans, manifest.lookahead.path):
        if relative not in manifest.files:
            raise BundleError(
                f"{manifest_path} is malformed: {relative} is not among the listed files"
            )
    return manifest


def _check_versions(manifest_path: Path, record: Any) -> None:
    """Compare majors before validation, so that a newer bundle is not called malformed."""
    if not isinstance(record, dict):
        raise BundleError(f"{manifest_path} is malformed: expected a JSON object")
    contract = record.get("contract")
    contract_version = contract.get("version") if isinstance(contract, dict) else None
    for what, version, known in (
        ("bundle schema", record.get("schema_version"), SCHEMA_MAJOR),
        ("contract", contract_version, CONTRACT_MAJOR),
    ):
        major = version.split(".")[0] if isinstance(version, str) else ""
        if not major.isdecimal() or len(major) > _MOST_VERSION_DIGITS:
            raise BundleError(
                f"{manifest_path} is malformed: {what} version is {version!r:.60}, "
                f"expected one like '{known}.0'"
            )
        if int(major) != known:
            raise BundleVersionError(
                f"{manifest_path} has {what} version {version}; this lookahead-attention reads "
                f"version {known}.x: upgrade the package or rebuild the bundle"
            )


def _first_problem(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        return f"{place}: {first['msg']}"
    return str(error)


def _check_no_strays(root: Path, manifest: Manifest) -> None:
    """Refuse files without a digest: what loads a tokenizer or a template looks for them."""
    stray = _find_stray(root, manifest.files, beside=(_REPORTS,))
    if stray is not None:
        raise BundleError(
            f"bundle {root} is unsafe: it holds {stray!r}, which its manifest does not list; "
            "remove that or rebuild the bundle"
        )


def _find_stray(root: Path, listed: Collection[str], *, beside: tuple[str, ...]) -> str | None:
    """The first file that is neither the manifest, nor listed, nor in a folder of `beside`.

    A link to a folder counts as a file: what is behind it is not the bundle's.

    Raises:
        OSError: a folder cannot be read.
    """
    known = {MANIFEST_NAME, *listed}
    for folder, subfolders, names in os.walk(root, onerror=_raise):
        subfolders.sort()
        links = [name for name in subfolders if os.path.islink(os.path.join(folder, name))]
        for name in sorted([*names, *links]):
            relative = Path(folder, name).relative_to(root).as_posix()
            if relative not in known and not relative.startswith(beside):
                return relative
    return None


def _raise(error: OSError) -> None:
    raise error


def _check_file(root: Path, relative: str, entry: FileEntry, digests: DigestCheck) -> None:
    path = root / relative
    if not path.is_file():
        raise BundleError(
            f"bundle {root} is incomplete: {relative} is missing; copy it again or rebuild"
        )
    if not path.resolve().is_relative_to(root.resolve()):
        raise BundleError(
            f"bundle {root} is unsafe: {relative} links to {path.resolve()}, outside the bundle"
        )
    found = hash_file(path) if digests is DigestCheck.FULL else recall_digest(path)
    if found != entry:
        raise DigestError(
            f"bundle {root} is damaged: {relative} has sha256 {found.sha256[:12]} "
            f"({found.bytes} bytes), expected {entry.sha256[:12]} ({entry.bytes} bytes); "
            "copy it again or rebuild"
        )


@contextmanager
def write_bundle(
    destination: Path, *, adopts: Callable[[Path], bool] | None = None
) -> Iterator[Path]:
    """A working folder beside `destination` that takes its place when the block ends well.

    An old bundle there stays whole until the new one is complete; on any error, Ctrl-C included,
    the working folder is removed and the old bundle remains. A process that is killed leaves its
    working folder behind, for the next one.

    Args:
        destination: the bundle's folder.
        adopts: whether a working folder that was left behind is to be gone on with; all others are
            removed.

    Raises:
        UsageError: `destination` exists and is not a bundle, or holds files beside one.
        HostError: the disk is full or not writable.
    """
    check_destination(destination)
    destination = destination.resolve()  # a link stays a link; `.` gets a name
    made = [folder for folder in destination.parents if not folder.exists()]
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        work, claim = _adopt_abandoned(destination, adopts) or _make_work(destination)
    except OSError as error:
        raise _host_error(destination, error) from error
    try:
        work.chmod(0o755)
        yield work
        assert (work / MANIFEST_NAME).is_file(), "a bundle was written without its manifest"
        check_destination(destination)  # a build takes minutes, in which files can arrive there
        _swap(work, destination)
    except OSError as error:
        if _is_about(error, destination.parent):
            raise _host_error(destination, error) from error
        raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
        os.close(claim)
        with suppress(OSError):
            for folder in made:
                folder.rmdir()  # unless a bundle is in it


def _is_about(error: OSError, folder: Path) -> bool:
    """Whether the error is the target disk's, not one of reading a source elsewhere."""
    if error.filename is None:
        return error.errno in _DISK_ERRORS
    return Path(os.fsdecode(error.filename)).resolve().is_relative_to(folder)


def _claim(work: Path, *, shared: bool = False) -> int | None:
    """A descriptor that marks a working folder as in use until it is closed; None if it is.

    Args:
        work: the folder.
        shared: whether others may claim it as well who only look at it.
    """
    import fcntl  # POSIX only, and reading a bundle does not need it

    descriptor = os.open(work, os.O_RDONLY)
    try:
        kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def _make_work(destination: Path) -> tuple[Path, int]:
    """A new working folder and its claim."""
    work = Path(
        tempfile.mkdtemp(
            prefix=f".{destination.name}.", suffix=_WORK_SUFFIX, dir=destination.parent
        )
    )
    while (claim := _claim(work)) is None:
        time.sleep(_LOOKED_AT_S)  # somebody adds up what lies here
    return work, claim


def _adopt_abandoned(
    destination: Path, adopts: Callable[[Path], bool] | None
) -> tuple[Path, int] | None:
    """The first working folder of a killed build that is wanted; all others are removed."""
    found: tuple[Path, int] | None = None
    for work in _list_works(destination):
        claim = _claim(work)
        if claim is None:
            continue
        # Not another user's: it could neither be changed nor trusted.
        is_own = os.fstat(claim).st_uid == os.geteuid()
        if found is None and is_own and adopts is not None and adopts(work):
            found = work, claim
        else:
            shutil.rmtree(work, ignore_errors=True)
            os.close(claim)
    return found


def abandoned_bytes(destination: Path) -> int:
    """Bytes of working folders of builds that were killed; the next build uses or frees them."""
    sizes: dict[tuple[int, int], int] = {}  # by file: checks link the weights
    for work in _list_works(destination.resolve()):
        with suppress(OSError):  # another build ends meanwhile
            claim = _claim(work, shared=True)
            if claim is None:
                continue
            try:
                for path in work.rglob("*"):
                    facts = path.lstat()
                    if stat.S_ISREG(facts.st_mode):
                        sizes[facts.st_dev, facts.st_ino] = facts.st_size
            finally:
                os.close(claim)
    return sum(sizes.values())


def _list_works(destination: Path) -> Iterator[Path]:
    return destination.parent.glob(f".{glob.escape(destination.name)}.*{_WORK_SUFFIX}")


def check_destination(destination: Path) -> None:
    """Refuse an output path whose replacement could lose something other than a bundle.

    Raises:
        UsageError: `destination` exists and is neither a bundle nor an empty folder, or it holds
            files that are not the bundle's.
    """
    try:
        if not destination.exists():
            return
        problem = _describe_loss(destination)
    except OSError as error:
        raise UsageError(
            f"output {destination} cannot be used: {error.strerror or error}; choose another --out"
        ) from error
    if problem is not None:
        raise UsageError(
            f"output {destination} exists and {problem}; choose another --out or move that away"
        )


def _describe_loss(destination: Path) -> str | None:
    """What forbids to replace this path, None if nothing would be lost."""
    if not destination.is_dir():
        return "is a file"
    if not any(destination.iterdir()):
        return None
    listed = _read_listed_files(destination)
    if listed is None:
        return "is a folder that is no bundle"
    stray = _find_stray(destination, listed, beside=(_REPORTS, _PLANS))
    return None if stray is None else f"holds {stray!r}, which is not the bundle's"


def _read_listed_files(folder: Path) -> Collection[str] | None:
    """What a bundle's manifest lists, of whatever version; None if this is no bundle."""
    try:
        record: Any = json.loads((folder / MANIFEST_NAME).read_bytes())
    except (FileNotFoundError, IsADirectoryError, ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or not {"schema_version", "contract"} <= record.keys():
        return None
    files = record.get("files")
    return files.keys() if isinstance(files, dict) else ()


def _host_error(destination: Path, error: OSError) -> HostError:
    return HostError(
        f"could not write the bundle {destination}: {error.strerror or error}; "
        "nothing was changed there. Free some space or choose another --out"
    )


def _swap(work: Path, destination: Path) -> None:
    """Put `work` in the place of `destination`, and what was there in the place of `work`."""
    if not destination.exists():
        os.replace(work, destination)
    elif not _exchange(work, destination):
        # Two renames: a kill between them leaves the old bundle whole, under its retired name.
        retired = work.with_suffix(".old")
        os.replace(destination, retired)
        try:
            os.replace(work, destination)
        except BaseException:
            os.replace(retired, destination)
            raise
        shutil.rmtree(retired, ignore_errors=True)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two folders in one step, where the system can (Linux: renameat2)."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    paths = (os.fsencode(one), os.fsencode(other))
    return bool(rename(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], _RENAME_EXCHANGE) == 0)


def seal_bundle(work: Path, manifest: Manifest, *, leaving_out: Collection[Path] = ()) -> Manifest:
    """Write the manifest with the digest of every file now in `work`; returns it as written.

    Args:
        work: the bundle's folder.
        manifest: without digests.
        leaving_out: folders in it that are gone before it is a bundle.
    """
    files = {
        path.relative_to(work).as_posix(): hash_file(path)
        for path in sorted(work.rglob("*"))
        if path.is_file()
        and path != work / MANIFEST_NAME
        and not any(path.is_relative_to(folder) for folder in leaving_out)
    }
    sealed = manifest.model_copy(update={"files": files})
    replace_manifest(work, sealed, partial=(work / MANIFEST_NAME).with_suffix(".partial"))
    return sealed


def replace_manifest(root: Path, manifest: Manifest, *, partial: Path) -> None:
    """Put a manifest into a bundle in one step.

    Args:
        root: the bundle's folder.
        manifest: the new one.
        partial: where it is written first, on the same disk.

    Raises:
        OSError: the disk is full or not writable.
    """
    partial.write_text(manifest.model_dump_json(indent=2) + "\n", encoding="utf-8")
    os.replace(partial, root / MANIFEST_NAME)
