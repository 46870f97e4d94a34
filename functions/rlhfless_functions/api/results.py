"""The results of requests: the content of the result file and of the `done` event."""

from pydantic import Field

from rlhfless_functions.api.messages import DecodeCounts, FinishReason, Message, WeightsFetched, WeightsReference


class DataCounts(Message):
    """Counts of a dataset's rows."""

    rows: int = Field(ge=0)
    """Rows of the dataset."""
    too_long: int = Field(default=0, ge=0)
    """Rows dropped because they are longer than the longest prompt."""
    empty: int = Field(default=0, ge=0)
    """Rows dropped because they are empty."""
    answered: int = Field(default=0, ge=0)
    """Rows dropped because their last message is the assistant's."""
    without_ground_truth: int = Field(default=0, ge=0)
    """Prompts without ground truth, if others have one; they are kept."""
    chats: int = Field(default=0, ge=0)
    """Prompts that are chat messages; the others are plain text."""
    filtered: int = Field(default=0, ge=0)
    """Rows that the user's filter left out; `rows` does not include them."""
    sizes: list[int] = Field(default=[])
    """Usable prompts of each source, one after the other."""
    first: dict[str, str] = Field(default={})
    """Place of the first row of each kind, by the name of the count."""
    notes: list[str] = Field(default=[])
    """Remarks on how the rows were read, a phrase each."""

    @property
    def left_out(self) -> int:
        """Number of rows dropped."""
        return self.too_long + self.empty + self.answered

    @property
    def reasons(self) -> str:
        """Reasons why rows were dropped, for people: each with its count and its first row."""
        return ", ".join(
            f"{getattr(self, name)} {words}" + (f" (first {self.first[name]})" if name in self.first else "")
            for name, words in _REASONS.items()
            if getattr(self, name)
        )

    @property
    def remedies(self) -> str:
        """Remedies for the dropped rows."""
        text = "; ".join(remedy for name, remedy in _REMEDIES.items() if getattr(self, name))
        return text[:1].upper() + text[1:]


_REASONS = {
    "too_long": "longer than sampling.maxPromptTokens",
    "empty": "empty",
    "answered": "ending with the assistant's message",
}
_REMEDIES = {
    "too_long": "raise sampling.maxPromptTokens or shorten the prompts",
    "empty": "give the empty rows a prompt or remove them",
    "answered": (
        "remove the answers from the prompts, or set data.answeredPrompts to continue if they are beginnings that the"
        " model should continue"
    ),
}


class MaterializeResult(Message):
    """The number of published prompts, and counts of the rows."""

    prompts: int
    dropped: int
    """Number of dropped rows."""
    uri: str
    counts: DataCounts
    """Counts of all rows."""


class GenerationResult(Message):
    """The result of a share."""

    finished: int
    unfinished: int
    """Samples left when the instance was drained, or when all of them waited for their environments; their partial
    tokens are in the parts."""
    waited_seconds: float = 0.0
    """Seconds in which all samples waited for their environments, or none were there and others came later."""
    all_wait: bool = False
    """Whether the request ended because all samples that are left wait for their environments."""
    parts: list[str]
    """URIs of all rollout parts of this attempt."""
    prompt_tokens: int
    """Prompt tokens that were computed (a group's prompt is computed once)."""
    response_tokens: int
    """Response tokens that were computed."""
    weights_seconds: float = 0.0
    """Seconds until the engine had the weights: zero, or for replacing others in place, or for a start."""
    weights_fetched: WeightsFetched = WeightsFetched()
    """Counts of the files fetched for the weights."""
    shared_prefixes: dict[str, float] = Field(default={})
    """Amounts sent to and fetched from other actors: `tokens_sent`, `bytes_sent`, `seconds_sent` and the same with
    `_fetched`, over all workers of the engine. `seconds_waited` are those in which the engine had nothing else to do.
    Empty if the engine can't share prefixes."""
    decoding: DecodeCounts = DecodeCounts()
    """Counts of how the tokens were decoded."""


class SampledTokens(Message):
    """Response tokens that one weights version sampled."""

    version: int
    tokens: int = Field(ge=1)


class GroupResult(Message):
    """The control plane's view of a group."""

    prompt: int
    reward: float | None
    """Mean reward of the group; None if no sample could be scored."""
    spread: float
    """Standard deviation of the group's rewards. If it is 0 and the group is the baseline, there is nothing to
    learn."""
    in_loss: bool = True
    """Whether any of its samples is in the loss."""
    sampled: list[SampledTokens] = Field(default=[])
    """Response tokens by the weights version that sampled them, from the oldest on."""
    switched_responses: int = Field(default=0, ge=0)
    """Responses with tokens of several weights versions."""
    metrics: dict[str, float] = Field(default={})
    """This group's part of the chunk's metrics, if the request asks for it."""

    @property
    def teaches(self) -> bool:
        """Whether comparing its samples can teach something."""
        return self.in_loss and self.spread > 0


class ExampleSample(Message):
    """A scored sample as text, for people to read; a very long text is shortened in the middle."""

    row: int = 0
    """Row of the prompt in the materialised dataset."""
    index: int = 0
    """Number of the sample in its group."""
    prompt: str
    response: str
    messages: list[dict[str, str]] = Field(default=[])
    """The response of an episode as messages: what the environment began with (`user`), the model's turns
    (`assistant`), and what came between them (`tool`)."""
    reward: float | None
    terms: dict[str, float | None] = Field(default={})
    """Each reward's value, before weighting."""
    advantage: float | None = None
    """Mean over the tokens, before whitening over the batch; None in an evaluation, and if the learner estimates it."""
    tokens: int
    finish_reason: FinishReason
    version: int = 0
    """Weights version that sampled its last token."""


class PrepareResult(Message):
    """A prepared chunk of groups."""

    part: str
    groups: list[GroupResult]
    examples: list[ExampleSample] = Field(default=[])
    """The samples that the request wants as text, in its order."""
    metrics: dict[str, float]
    """Metrics. Names with `/sum` and `/count` are sums and counts, which the control plane adds up over chunks."""
    load_seconds: float = Field(default=0.0, ge=0)
    """Seconds by which models that were not in memory, or were of another version, delayed the result."""


class LearnResult(Message):
    """The next weights version."""

    weights: WeightsReference
    critic: WeightsReference | None = None
    checkpoint: str | None = None
    metrics: dict[str, float]


class TakeUpResult(Message):
    """The state is in memory."""

    load_seconds: float
    """Seconds of loading models and checkpoint; 0 if they were in memory."""
    replay_seconds: float
    """Seconds of repeating steps since the checkpoint."""


class SaveResult(Message):
    """The checkpoint of a learner that may be let go."""

    checkpoint: str
    seconds: float
    """Seconds of writing it."""


class ExportResult(Message):
    """The exported folder."""

    uri: str
