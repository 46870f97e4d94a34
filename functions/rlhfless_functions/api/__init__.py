"""The wire contract between the control plane and the functions. This package does not import torch.

One request is one HTTP POST to `/v1/run`. The answer is a stream of newline-delimited JSON events that ends with one
terminal record, `done` or `failed`. A stream that ends without one is incomplete, even if its HTTP status is 200. The
request holds everything that a fresh instance needs: an instance is a cache, never an owner. Tokens and
log-probabilities travel through the artifact store, never through this contract.

- `messages`: the base of all messages, the references in them, and the contract's version.
- `requests`: a request for each kind of work, and `parse_request`. `generation`: parts of a generation request.
- `prompting`: the surroundings of prompts, as a published model names them.
- `live`: the lines that add samples to a request whose body stays open, and take them back.
- `results`: a result for each kind of request.
- `events`: the events of a stream, and how to read and write them.
- `preload`: the model that an instance loads before it is ready.
- `pieces`: the pieces of a step's batch, and their journal.
- `metrics`: names, units and meanings of all metrics.
- `probe`: the messages of `rlhfless probe`.
- `reward_trial`, `episode_trial`: the messages of `rlhfless try-reward` and `try-environment`.
- `data_check`: the messages of `rlhfless validate --data`.
"""

from rlhfless_functions.api.events import (
    Awake,
    ColdStart,
    Done,
    EngineRoom,
    Event,
    Failed,
    FailureReason,
    FinishedSample,
    Heartbeat,
    Learnt,
    Partial,
    Progress,
    Published,
    Samples,
    Started,
    Waiting,
    dump_event,
    ends_task,
    parse_event,
)
from rlhfless_functions.api.generation import (
    LiveBatch,
    NextWeights,
    SharedPrefix,
    SharedPrefixes,
    Shelter,
)
from rlhfless_functions.api.live import AddSamples, Join, Leave, Line, NewWeights, dump_line, parse_line
from rlhfless_functions.api.messages import (
    PROTOCOL,
    STAGES,
    DecodeCounts,
    FinishReason,
    Message,
    Purpose,
    SampleTask,
    Stage,
    TaskKey,
    UnsupportedProtocolError,
    WeightsFetched,
    WeightsReference,
)
from rlhfless_functions.api.pieces import JournalledPiece, Piece, piece_uri
from rlhfless_functions.api.preload import Preload
from rlhfless_functions.api.prompting import PROMPTING, Prompting
from rlhfless_functions.api.requests import (
    BaseRequest,
    BatchReference,
    ExportRequest,
    Gang,
    GenerationRequest,
    LearnRequest,
    MaterializeRequest,
    PrepareRequest,
    RunRequest,
    SaveRequest,
    StepSettings,
    TakeUpRequest,
    TrainingProgress,
    UnpublishedVersion,
    parse_request,
)
from rlhfless_functions.api.results import (
    DataCounts,
    ExampleSample,
    ExportResult,
    GenerationResult,
    GroupResult,
    LearnResult,
    MaterializeResult,
    PrepareResult,
    SampledTokens,
    SaveResult,
    TakeUpResult,
)
