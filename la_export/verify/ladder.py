"""What every rung works with, and the climb itself.

Expensive things that several rungs need, such as plain decoding of every prompt, are made when
first asked for.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from itertools import cycle, islice, product
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file

from la_export.verify.decoding import Decoded, decode
from la_export.verify.epsilon import measure_epsilon
from la_export.verify.findings import Figure, Finding, RungResult, Status
from la_export.verify.probes import BorrowedBackend, GivenProposals
from la_export.verify.prompts import PROMPTS, LadderPrompt
from la_export.verify.reference import OwnReference, Reference, SourceModel
from la_export.verify.tolerance import Tolerance, tolerance_of
from la_runtime.backends.base import Backend
from la_runtime.bundle import Bundle, Manifest
from la_runtime.chat import CHAT_TEMPLATE_NAME
from la_runtime.contract import Name
from la_runtime.errors import (
    BundleError,
    CheckError,
    LookaheadError,
    NonFiniteScoreError,
    NotRunError,
    UsageError,
)
from la_runtime.generation import Engine
from la_runtime.layout import Layout
from la_runtime.sampling import SamplingParams
from la_runtime.source_names import SourceName
from la_runtime.storage import round_to

__all__ = [
    "FULL",
    "QUICK",
    "RECIPES",
    "Configuration",
    "EncodedPrompt",
    "Ladder",
    "LadderProgress",
    "LadderSettings",
    "LookaheadRun",
    "Proposals",
    "Rung",
    "climb",
]

logger = logging.getLogger(__name__)

# A wider block than any step needs, so that prefill has room beside the lookaheads.
_PREFILL_ROOM: Final = 32
_DRAFTS_OF_A_TREE: Final = 10
_DRAFTS_OF_A_WIDE_TREE: Final = 31
_CUT_STEP: Final = 5
_CUT_LENGTHS: Final = 4
_QUESTION: Final = "Why?"
# Tokens that are enough for a draft to stand, though two proposals in seven are wrong.
_ROOM_FOR_BLOCKS: Final = 6
# Some rungs read a whole text in one pass, or pad every pass to one width.
_LEAST_BLOCK: Final = 320
_LEAST_BATCH: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class LadderSettings:
    """How much a ladder compares.

    Args:
        prompts: of the shipped ones; a user's file is used whole.
        prompt_tokens: longest prompt; longer ones are cut.
        new_tokens: decoded from each prompt.
        every_prompt: compare every prompt in every configuration, not each in one of them.
        epsilon_positions: positions over which epsilon is measured.
        fixed_width_prompts: prompts decoded at one width.
        seeds: of sampled decoding.
        cuts: places at which an ending is forced.
        long_prompt: tokens of the longest odd prompt.
        perplexity_tokens: tokens whose perplexity is taken.
        vocabulary_reads: token ids that are read once each, of those no prompt holds.
        vocabulary_texts: token ids whose text is compared with transformers'.
    """

    prompts: int
    prompt_tokens: int
    new_tokens: int
    every_prompt: bool
    epsilon_positions: int
    fixed_width_prompts: int
    seeds: int
    cuts: int
    long_prompt: int
    perplexity_tokens: int
    vocabulary_reads: int
    vocabulary_texts: int


FULL: Final = LadderSettings(
    prompts=len(PROMPTS),
    prompt_tokens=192,
    new_tokens=32,
    every_prompt=True,
    epsilon_positions=1000,
    fixed_width_prompts=2,
    seeds=20,
    cuts=4,
    long_prompt=1536,
    perplexity_tokens=512,
    vocabulary_reads=2048,
    vocabulary_texts=2**31,
)
QUICK: Final = LadderSettings(
    prompts=5,
    prompt_tokens=48,
    new_tokens=10,
    every_prompt=False,
    epsilon_positions=64,
    fixed_width_prompts=1,
    seeds=2,
    cuts=1,
    long_prompt=160,
    perplexity_tokens=96,
    vocabulary_reads=320,
    vocabulary_texts=2048,
)


# Strong filters and penalties: what is done to scores must show in a few tokens.
RECIPES: Final = (
    SamplingParams(
        temperature=0.6,
        top_p=0.6,
        repetition_penalty=1.5,
        presence_penalty=0.7,
        frequency_penalty=0.4,
    ),
    SamplingParams(temperature=1.0, min_p=0.5, logit_bias={0: -1.5}),
    SamplingParams(temperature=1.4),
    SamplingParams(temperature=0.8, top_k=12, top_p=0.95, repetition_penalty=1.1),
)


class Proposals(StrEnum):
    """Whose proposals are verified: the bundle's ``own``, or ``given`` ones, mostly right."""

    OWN = "own"
    GIVEN = "given"


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """One way to decode with lookaheads.

    Args:
        k: slots of a group.
        layout: where groups stand.
        proposals: whose the slots' are.
        tree: drafts of every source, so many in a tree; 0 for those of the slots in a chain.
    """

    k: int
    layout: Layout
    proposals: Proposals
    tree: int = 0

    def __str__(self) -> str:
        shape = f" and trees of {self.tree}" if self.tree else ""
        return f"k={self.k} {self.layout}{shape} with {self.proposals} proposals"

    @property
    def max_rows(self) -> int:
        """Rows of the widest step."""
        num_drafts = self.tree or self.k
        return 1 + num_drafts + self.k * len(self.layout.groups(num_drafts, self.k))

    def ask(self, params: SamplingParams) -> SamplingParams:
        """These parameters for a decoding like this."""
        return replace(
            params,
            k=self.k,
            layout=self.layout,
            sources=tuple(SourceName) if self.tree else None,
            drafts=self.tree or None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedPrompt:
    """A prompt as token ids."""

    name: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LookaheadRun:
    """What one prompt gave with lookaheads."""

    prompt: EncodedPrompt
    configuration: Configuration
    decoded: Decoded


class Ladder:
    """A bundle under verification, and what it is compared with.

    Args:
        bundle: opened, its digests checked.
        backend: its graph.
        source: the checkpoint; None compares the bundle with itself.
        settings: how much is compared.
        lookahead_lengths: values of k; those the bundle was built for when empty.
        prompts: texts; the shipped ones when empty.
        layouts: where lookaheads stand.
        backend_name: what the backend is called.
        threads: of one pass of it; 0 if the library chooses.
    """

    def __init__(
        self,
        bundle: Bundle,
        backend: Backend,
        *,
        source: SourceModel | None,
        settings: LadderSettings = FULL,
        lookahead_lengths: Sequence[int] = (),
        prompts: Sequence[LadderPrompt] = (),
        layouts: Sequence[Layout] = tuple(Layout),
        backend_name: str = "ort-cpu",
        threads: int = 0,
    ) -> None:
        self.bundle = bundle
        self.backend_name = backend_name
        self.threads = threads
        self.backend = backend
        self.source = source
        self.settings = settings
        self.own_reference: Reference = OwnReference(backend)
        self.reference = self.own_reference if source is None else source.reference
        self._check_limits()
        self.engine = Engine(bundle, BorrowedBackend(backend), k=0)
        built = self.manifest.lookahead_lengths
        self.lookahead_lengths = tuple(k for k in lookahead_lengths or built if k > 0)
        self.layouts = tuple(layouts)
        self._check_template()
        texts = prompts or PROMPTS[: settings.prompts]
        self.prompts = tuple(self._encode(prompt, index) for index, prompt in enumerate(texts))

    @property
    def manifest(self) -> Manifest:
        """The bundle's."""
        return self.bundle.manifest

    @property
    def context(self) -> int:
        """Number of positions the model has."""
        return self.manifest.model.context

    @property
    def tolerance(self) -> Tolerance:
        """What arithmetic of the bundle's precision is allowed."""
        return tolerance_of(self.manifest.precision)

    @property
    def most_scored(self) -> int:
        """Most rows of a sequence whose scores one pass can compute."""
        return self.backend.limits.rows or sys.maxsize

    @property
    def new_tokens(self) -> int:
        """Tokens to decode, as many as fit behind the longest prompt."""
        return min(self.settings.new_tokens, self.context - self._longest_prompt)

    @property
    def has_room_for_blocks(self) -> bool:
        """Whether given proposals must stand; a context of a few tokens ends before."""
        return bool(self.lookahead_lengths) and self.new_tokens >= _ROOM_FOR_BLOCKS

    @property
    def _longest_prompt(self) -> int:
        return min(self.settings.prompt_tokens, max(1, self.context // 2))

    def _check_limits(self) -> None:
        """Require passes that hold what the rungs put into one."""
        most, needed = self.backend.limits.block, min(_LEAST_BLOCK, self.context)
        if most is not None and most < needed:
            raise NotRunError(
                f"passes of this bundle have at most {most} rows, and verifying needs {needed}; "
                f"build it with --prefill-chunk {needed} or more"
            )
        batch = self.backend.limits.batch
        if batch is not None and batch < _LEAST_BATCH:
            raise NotRunError(
                f"passes of this plan have at most {batch} sequences, and verifying needs "
                f"{_LEAST_BATCH}; build plans with --max-batch {_LEAST_BATCH} or more"
            )

    def _check_template(self) -> None:
        """Require that a question can be put, also when no prompt is one."""
        if self.has_chat_template:
            try:
                self.engine.encode(_QUESTION, chat=True)
            except UsageError as error:
                raise BundleError(f"a question cannot be put into the template: {error}") from error

    def _encode(self, prompt: LadderPrompt, index: int) -> EncodedPrompt:
        """A prompt's tokens; those that are cut are cut at different lengths."""
        is_chat = prompt.is_question and self.has_chat_template
        token_ids = self.engine.encode(prompt.text, chat=is_chat)
        limit = max(1, self._longest_prompt - _CUT_STEP * (index % _CUT_LENGTHS))
        return EncodedPrompt(name=prompt.name, token_ids=token_ids[:limit])

    @cached_property
    def own_vectors(self) -> NDArray[np.float32]:
        """The bundle's lookahead vectors as its graph sees them, [k_max, hidden] float32."""
        path = self.bundle.path(self.manifest.lookahead.path)
        try:
            vectors: NDArray[np.float32] = load_file(path)[Name.LOOKAHEAD_EMBEDDINGS]
        except (KeyError, SafetensorError) as error:
            raise BundleError(f"{path} holds no lookahead vectors ({error})") from error
        return round_to(vectors, self.manifest.contract.compute_dtype)

    @cached_property
    def has_chat_template(self) -> bool:
        """Whether questions go into a template."""
        return self.bundle.has(CHAT_TEMPLATE_NAME)

    @cached_property
    def configurations(self) -> tuple[Configuration, ...]:
        """Every k, layout and origin of proposals; then every k with trees, where they fit."""
        chains = [
            Configuration(k=k, layout=layout, proposals=proposals)
            for k, layout, proposals in product(self.lookahead_lengths, self.layouts, Proposals)
        ]
        trees = [
            Configuration(
                k=k, layout=Layout.ROOT_ONLY, proposals=Proposals.GIVEN, tree=_DRAFTS_OF_A_TREE
            )
            for k in self.lookahead_lengths
        ]
        trees += [replace(tree, tree=_DRAFTS_OF_A_WIDE_TREE) for tree in trees[-1:]]
        limits = self.backend.limits
        most = min(limits.block or sys.maxsize, self.most_scored)
        return (*chains, *(tree for tree in trees if tree.max_rows <= most))

    @cached_property
    def chosen_configurations(self) -> tuple[Configuration, ...]:
        """Those that the slow rungs compare: all of them, or a few that hold each k and layout.

        The few are given their proposals, because those stand; the last one takes the bundle's.
        """
        if self.settings.every_prompt or not self.lookahead_lengths:
            return self.configurations
        layouts = islice(cycle(self.layouts), len(self.lookahead_lengths))
        given = (
            Configuration(k=k, layout=layout, proposals=Proposals.GIVEN)
            for k, layout in zip(reversed(self.lookahead_lengths), layouts, strict=True)
        )
        chains = [c for c in self.configurations if not c.tree]
        own = replace(chains[-1], proposals=Proposals.OWN, layout=self.layouts[0])
        trees = [c for c in self.configurations if c.tree]
        return (*given, own, *trees[-1:])

    def greedy(self, configuration: Configuration | None = None) -> SamplingParams:
        """Parameters of greedy decoding, plain without a configuration; end tokens are ignored."""
        return self._decoding(configuration, SamplingParams())

    def sampled(self, seed: int, configuration: Configuration | None = None) -> SamplingParams:
        """Parameters of sampled decoding: seeds take the recipes in turn.

        A recipe with a bias is biased against what plain greedy decoding says.
        """
        params = replace(RECIPES[seed % len(RECIPES)], seed=seed)
        if params.logit_bias:
            (bias,) = set(params.logit_bias.values())
            said = self.plain_runs[self.prompts[0].name].token_ids
            params = replace(params, logit_bias=dict.fromkeys(said, bias))
        return self._decoding(configuration, params)

    def _decoding(
        self, configuration: Configuration | None, params: SamplingParams
    ) -> SamplingParams:
        """With the configuration's lookaheads, and as long as every comparison is."""
        params = replace(params, max_new_tokens=self.new_tokens, ignore_eos=True)
        return replace(params, k=0) if configuration is None else configuration.ask(params)

    def borrowed(self) -> Backend:
        """The backend for an engine that will close it."""
        return BorrowedBackend(self.backend)

    def proposing(
        self,
        configuration: Configuration,
        *texts: Sequence[int],
        backend: Backend | None = None,
    ) -> Backend:
        """A backend whose slots propose as the configuration says.

        Args:
            configuration: whose proposals.
            texts: prompt and plain decoding's tokens of each sequence, the proposals to give.
            backend: what runs the graph; the bundle's own when not given.
        """
        backend = backend or self.backend
        if configuration.proposals is Proposals.OWN:
            return backend
        return GivenProposals(backend, texts)

    def decode(self, prompt: Sequence[int], params: SamplingParams) -> Decoded:
        """Decode one prompt on the bundle's own backend."""
        (decoded,) = decode(self.backend, self.manifest, [prompt], [params])
        return decoded

    def plain_decoding(self, prompt: EncodedPrompt, params: SamplingParams) -> Decoded:
        """What plain decoding alone makes of a prompt with these parameters, whatever their k."""
        if params.is_plain_greedy and params.ignore_eos:
            return self.plain_runs[prompt.name].first(params.max_new_tokens)
        return self.decode(
            prompt.token_ids, replace(params, k=0, layout=None, sources=None, drafts=None)
        )

    @cached_property
    def plain_runs(self) -> Mapping[str, Decoded]:
        """Plain greedy decoding by the name of the prompt."""
        return {p.name: self.decode(p.token_ids, self.greedy()) for p in self.prompts}

    def text(self, prompt: EncodedPrompt) -> tuple[int, ...]:
        """A prompt and what plain decoding makes of it."""
        return (*prompt.token_ids, *self.plain_runs[prompt.name].token_ids)

    @cached_property
    def lookahead_runs(self) -> tuple[LookaheadRun, ...]:
        """Greedy decoding with lookaheads, of every prompt or of each in one configuration."""
        pairs = (
            product(self.configurations, self.prompts)
            if self.settings.every_prompt
            else zip(self.configurations, cycle(self.prompts), strict=False)
        )
        runs = []
        for configuration, prompt in pairs:
            backend = self.proposing(configuration, self.text(prompt))
            params = self.greedy(configuration)
            (decoded,) = decode(backend, self.manifest, [prompt.token_ids], [params])
            runs.append(LookaheadRun(prompt=prompt, configuration=configuration, decoded=decoded))
        return tuple(runs)

    @cached_property
    def long_text(self) -> tuple[int, ...]:
        """Prompts and what they gave, over and over, as long as the context."""
        tokens = [token for prompt in self.prompts for token in self.text(prompt)]
        return tuple(islice(cycle(tokens), self.context))

    @cached_property
    def measured_epsilon(self) -> float:
        """Margin of a near-tie, measured; see `epsilon.measure_epsilon`."""
        positions = min(self.settings.epsilon_positions, self.context)
        return measure_epsilon(
            self.backend,
            self.long_text[:positions],
            widths=self.block_widths,
            context=self.context,
        )

    @property
    def epsilon(self) -> float:
        """Margin of a near-tie: the measured one, as far as it is allowed."""
        return min(self.measured_epsilon, self.tolerance.epsilon)

    @property
    def block_widths(self) -> tuple[int, ...]:
        """Rows of the widest step of every k and layout."""
        widths = {c.max_rows for c in self.configurations}
        return tuple(sorted(widths)) or (_PREFILL_ROOM,)

    def fixed_width(self, configuration: Configuration) -> int:
        """A width that holds every step of the configuration and some prompt."""
        return configuration.max_rows + _PREFILL_ROOM


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """One rung: its number and name, and the check."""

    number: int
    name: str
    check: Callable[[Ladder], Finding]


class LadderProgress(Protocol):
    """Is told of each rung as it begins and ends."""

    def start(self, rung: Rung) -> None:
        """A rung begins."""
        ...

    def finish(self, result: RungResult) -> None:
        """A rung has ended."""
        ...


def climb(
    ladder: Ladder, rungs: Sequence[Rung], progress: LadderProgress | None = None
) -> tuple[RungResult, ...]:
    """Check every rung, whatever the ones before it found.

    A rung that breaks off with an error of ours has failed if the error says that the bundle or
    its model is at fault; any other error means that it could not run.
    """
    results = []
    for rung in rungs:
        if progress is not None:
            progress.start(rung)
        results.append(_check(ladder, rung))
        if progress is not None:
            progress.finish(results[-1])
    return tuple(results)


def _check(ladder: Ladder, rung: Rung) -> RungResult:
    began = time.perf_counter()
    figures: tuple[Figure, ...] = ()
    suspect = None
    try:
        finding = _run(ladder, rung)
    except (BundleError, CheckError, NonFiniteScoreError) as error:
        status, detail = Status.FAILED, str(error)
    except LookaheadError as error:
        status, detail = Status.COULD_NOT_RUN, str(error)
    else:
        status, detail, figures = finding.status, finding.explanation, finding.figures
        suspect = finding.suspect
    return RungResult(
        number=rung.number,
        name=rung.name,
        status=status,
        figures=figures,
        detail=" ".join(detail.split()),
        seconds=time.perf_counter() - began,
        suspect=suspect,
    )


def _run(ladder: Ladder, rung: Rung) -> Finding:
    try:
        return rung.check(ladder)
    except LookaheadError:
        raise
    except Exception as error:  # of any library below; what it means for the bundle is unknown
        logger.info("rung %d broke off", rung.number, exc_info=True)
        raise NotRunError(f"{type(error).__name__}: {error}") from error
