"""What came of a step's generation: finished samples, complete groups, and what can be learnt about the instances."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from rlhfless_functions.api import DecodeCounts, Done, EngineRoom, Samples, SampleTask
from rlhfless_operator.planner.moves.migration import Key


@dataclass(frozen=True)
class CompleteGroup:
    """A prompt whose samples are all published."""

    prompt: int
    samples: list[SampleTask]
    lengths: list[int]
    """Response tokens of each sample."""
    parts: list[str]
    """Rollout parts that hold them."""


@dataclass(frozen=True)
class Stretch:
    """What one request generated, and how long that took: what the speed of the instances can be learnt from."""

    begun: Mapping[Key, int]
    """Response tokens that each of its samples had when it began."""
    tokens: Mapping[Key, int]
    """Response tokens that each had at its end, or when the request was last heard of."""
    seconds: float
    decoding: DecodeCounts = field(default_factory=DecodeCounts)
    """How its tokens came about."""
    fetched_tokens: float = 0.0
    """Prompt tokens whose keys and values were another actor's."""
    waited_seconds: float = 0.0
    """In which it waited for these with nothing else to do."""


@dataclass
class GenerationOutcome:
    """What the actors of a step did."""

    sinks: list[str]
    """Folders with rollout parts of this step, of earlier drivers too."""
    lengths: dict[Key, int] = field(default_factory=dict)
    """Response tokens of every finished sample."""
    lost: int = 0
    """Instances that were lost."""
    cuts: int = 0
    """Requests that were cut to move samples."""
    switches: int = 0
    """Requests that were cut to go on with newer weights."""
    moved: int = 0
    """Samples that became another actor's by choice."""
    tokens: int = 0
    """Response tokens of finished samples."""
    stretches: list[Stretch] = field(default_factory=list)
    """One for each request that said something of its speed."""
    weights_seconds: float = 0.0
    """Longest that an engine took until it had the step's weights."""
    weights_fetched: Counter[str] = field(default_factory=Counter)
    """What all engines fetched of them from an object store; see `WeightsFetched`."""
    prefixes: Counter[str] = field(default_factory=Counter)
    """What actors sent each other of shared prefixes; see `GenerationResult.shared_prefixes`."""
    shares_prefixes: bool = False
    """Whether actors were asked to share any. The engine of some can't, and tells of nothing."""
    decoding: Counter[str] = field(default_factory=Counter)
    """How tokens came about, of all requests; see `DecodeCounts`."""
    pauses: list[float] = field(default_factory=list)
    """Seconds from each decision to move samples until a request went on with them."""
    switch_pauses: list[float] = field(default_factory=list)
    """The same where the request went on with newer weights, which had to be loaded."""
    room: EngineRoom | None = None
    """The least that any instance has said to have room for; None while none has."""
    before: list[str] = field(init=False)
    """Those of the sinks that were there at first: of earlier drivers, with which any sample may have been begun."""

    def __post_init__(self) -> None:
        self.before = list(self.sinks)

    def has_room(self, room: EngineRoom) -> None:
        """An instance has said what it has room for."""
        self.room = room if self.room is None else least_room(self.room, room)

    def decoded(self, counts: DecodeCounts) -> None:
        """A request has come to an end, with these counts as it told last."""
        self.decoding.update(counts.model_dump())

    def done(self, event: Done) -> None:
        """A request has come to its end."""
        self.prefixes.update(event.result.get("shared_prefixes", {}))
        self.weights_fetched.update(event.result.get("weights_fetched", {}))
        self.weights_seconds = max(self.weights_seconds, event.result.get("weights_seconds", 0.0))


def least_room(one: EngineRoom, other: EngineRoom) -> EngineRoom:
    """What instances of both kinds have room for."""
    return EngineRoom(
        sequences=min(one.sequences, other.sequences),
        kv_tokens=min(one.kv_tokens, other.kv_tokens),
        keeps_contexts=one.keeps_contexts and other.keeps_contexts,
        longest_draft=max(one.longest_draft, other.longest_draft),
    )


class Completion:
    """Notices when groups are complete.

    Args:
        shares: all samples that will be generated.
        outcome: finished samples are written down there.
        on_group: told of each group once.
    """

    def __init__(
        self,
        shares: Sequence[Sequence[SampleTask]],
        outcome: GenerationOutcome,
        on_group: Callable[[CompleteGroup], None],
    ) -> None:
        self._sizes = Counter(sample.prompt for share in shares for sample in share)
        self._outcome = outcome
        self._on_group = on_group
        self._finished: dict[int, dict[int, tuple[int, str]]] = {}

    def take(self, event: Samples) -> list[Key]:
        """Samples were announced; returns those that had not been before."""
        fresh = []
        for sample in event.samples:
            key = (sample.prompt, sample.index)
            if key in self._outcome.lengths:
                continue
            fresh.append(key)
            self._outcome.lengths[key] = sample.tokens
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
