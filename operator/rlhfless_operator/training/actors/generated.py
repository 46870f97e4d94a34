"""The outcome of a step's generation: finished samples, complete groups, and measurements of the instances."""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from rlhfless_functions.api import DecodeCounts, Done, EngineRoom, Samples, SampleTask
from rlhfless_operator.planner.acting import Acting
from rlhfless_operator.planner.moves.migration import Key


@dataclass(frozen=True)
class CompleteGroup:
    """A prompt whose samples are all in the store."""

    prompt: int
    samples: list[SampleTask]
    lengths: list[int]
    """Response tokens of each sample."""
    parts: list[str]
    """Rollout parts with the samples."""


@dataclass(frozen=True)
class Stretch:
    """The tokens that one request generated and the time that it took. The instances' speed is learnt from it."""

    begun: Mapping[Key, int]
    """Response tokens of each sample at the start of the request."""
    tokens: Mapping[Key, int]
    """Response tokens of each sample at its end, or at the last report of the request."""
    seconds: float
    decoding: DecodeCounts = field(default_factory=DecodeCounts)
    """Counts of passes and drafted tokens."""
    fetched_tokens: float = 0.0
    """Prompt tokens whose keys and values came from another actor."""
    waited_seconds: float = 0.0
    """Seconds that it waited with nothing else to do: for these keys and values, or for environments."""
    held: Collection[Key] = ()
    """Samples whose keys and values were there at its start."""


@dataclass
class GenerationOutcome:
    """The outcome of a step's actors."""

    sinks: list[str]
    """Folders with rollout parts of this step, including those of earlier drivers."""
    lengths: dict[Key, int] = field(default_factory=dict)
    """Response tokens of every finished sample."""
    acting: dict[Key, Acting] = field(default_factory=dict)
    """Time with the environment, and given tokens, of every finished sample; empty without an environment."""
    lost: int = 0
    """Number of lost instances."""
    cuts: int = 0
    """Number of requests that ended to move their samples."""
    switches: int = 0
    """Number of times that an actor was told to go on with newer weights."""
    moved: int = 0
    """Number of samples that were moved to another actor by choice."""
    tokens: int = 0
    """Response tokens of finished samples."""
    stretches: list[Stretch] = field(default_factory=list)
    """One for each request that reported enough to measure its speed."""
    weights_seconds: float = 0.0
    """Longest time until an engine had the step's weights, in seconds."""
    weights_fetched: Counter[str] = field(default_factory=Counter)
    """Counts of what all engines fetched of the weights from an object store; see `WeightsFetched`."""
    prefixes: Counter[str] = field(default_factory=Counter)
    """Counts of shared prefixes that actors sent each other; see `GenerationResult.shared_prefixes`."""
    shares_prefixes: bool = False
    """Whether actors were asked to share prefixes. Some engines can't, and report none."""
    decoding: Counter[str] = field(default_factory=Counter)
    """Counts of passes and drafted tokens over all requests; see `DecodeCounts`."""
    pauses: list[float] = field(default_factory=list)
    """Seconds from each decision to move samples until they were in the batch of another actor."""
    switch_pauses: list[float] = field(default_factory=list)
    """Seconds from each time that an actor was told of newer weights until it decoded with them, loading included."""
    let_go_seconds: float = 0.0
    """Seconds in which actors had no instance, because all of their samples waited for their environments."""
    held_seconds: float = 0.0
    """Seconds in which actors had instances."""
    room: EngineRoom | None = None
    """Least room that any instance has reported; None before the first report."""
    before: list[str] = field(init=False)
    """Sinks of earlier drivers. They may hold tokens of any sample."""

    def __post_init__(self) -> None:
        self.before = list(self.sinks)

    def has_room(self, room: EngineRoom) -> None:
        """Note the room that an instance reports."""
        self.room = room if self.room is None else least_room(self.room, room)

    def decoded(self, counts: DecodeCounts) -> None:
        """Add the final counts of a request."""
        self.decoding.update(counts.model_dump())

    def done(self, event: Done) -> None:
        """Note that a request has ended."""
        self.prefixes.update(event.result.get("shared_prefixes", {}))
        self.weights_fetched.update(event.result.get("weights_fetched", {}))
        self.weights_seconds = max(self.weights_seconds, event.result.get("weights_seconds", 0.0))


def least_room(one: EngineRoom, other: EngineRoom) -> EngineRoom:
    """Return the room that both kinds of instances have."""
    return EngineRoom(
        sequences=min(one.sequences, other.sequences),
        kv_tokens=min(one.kv_tokens, other.kv_tokens),
        longest_draft=max(one.longest_draft, other.longest_draft),
    )


def grouped(shares: Sequence[Sequence[SampleTask]]) -> list[list[SampleTask]]:
    """Return the samples of a plan by groups, in the order in which they begin."""
    groups: dict[int, list[SampleTask]] = {}
    for sample in (sample for share in shares for sample in share):
        groups.setdefault(sample.prompt, []).append(sample)
    return [sorted(group, key=lambda sample: sample.index) for group in groups.values()]


class Completion:
    """Notices when groups are complete.

    Args:
        shares: all samples that will be generated.
        outcome: receives the finished samples.
        on_group: called once with each complete group.
    """

    def __init__(
        self,
        shares: Sequence[Sequence[SampleTask]],
        outcome: GenerationOutcome,
        on_group: Callable[[CompleteGroup], None],
    ) -> None:
        self._sizes = Counter[int]()
        self.expect(shares)
        self._outcome = outcome
        self._on_group = on_group
        self._finished: dict[int, dict[int, tuple[int, str]]] = {}

    def expect(self, shares: Sequence[Sequence[SampleTask]]) -> None:
        """Add whole groups that will be generated, too."""
        self._sizes.update(sample.prompt for share in shares for sample in share)

    def take(self, event: Samples) -> list[Key]:
        """Take in announced samples; return those that are new."""
        fresh = []
        for sample in event.samples:
            key = (sample.prompt, sample.index)
            if key in self._outcome.lengths:
                continue
            fresh.append(key)
            self._outcome.lengths[key] = sample.tokens
            if sample.away_seconds is not None:
                self._outcome.acting[key] = Acting(sample.away_seconds, sample.given_tokens)
            self._outcome.tokens += sample.tokens
            group = self._finished.setdefault(sample.prompt, {})
            group[sample.index] = sample.tokens, event.part
            if len(group) == self._sizes[sample.prompt]:
                indices = sorted(group)
                tasks = [SampleTask(prompt=sample.prompt, index=index) for index in indices]
                lengths = [group[index][0] for index in indices]
                parts = sorted({part for _, part in group.values()})
                self._on_group(CompleteGroup(sample.prompt, tasks, lengths, parts))
        return fresh
