"""The artifact store: all files of a job, under any fsspec URI or plain path. Neither torch nor transformers here.

A published folder is immutable and exists whole or not at all: its `manifest.json`, with every file's size and
checksum, is written last. A crash leaves only files that no manifest names, which `sweep` removes.

- `files`: read, write, list and remove single files. `sealing`: their checksums. `names`: refuse names that lead out of
  a folder.
- `fencing`: write only while a right to it lasts.
- `manifest`: the sizes and checksums of a published folder.
- `publication`: publish a folder. `uploads`: publish to an object store. `sweeping`: remove files without an owner.
- `retrieval`: get a published folder onto the local disk. `copies`: keep it there.
- `arriving`: use a folder while it is fetched.
- `deltas`: the changes of a file since another version.
- `peers`: fetch from other instances. `line`: find them. `relaying`: pass a folder on to them.
- `counting`: count the fetched bytes and files.
- `errors`: errors of the store, with the remedy.
"""

from rlhfless_functions.artifacts.arriving import Arriving, BegunAgainError
from rlhfless_functions.artifacts.counting import fetched
from rlhfless_functions.artifacts.errors import (
    ArtifactCorruptError,
    ArtifactError,
    ArtifactMissingError,
    ArtifactUnwritableError,
    FencedOffError,
    missing_bucket,
)
from rlhfless_functions.artifacts.fencing import fenced_by
from rlhfless_functions.artifacts.files import (
    create_exclusive,
    create_json,
    exists,
    join,
    list_files,
    local_path,
    matching_files,
    read_bytes,
    read_json,
    remove,
    write_bytes,
    write_json,
)
from rlhfless_functions.artifacts.line import Line
from rlhfless_functions.artifacts.manifest import MANIFEST, Manifest, is_published, manifest
from rlhfless_functions.artifacts.peers import Sources
from rlhfless_functions.artifacts.publication import Publication, flush, publish, publishing
from rlhfless_functions.artifacts.retrieval import arrive, local_folder
from rlhfless_functions.artifacts.sealing import BLANK, KEY, is_sound, parse_sealed, seal, sealed_json
from rlhfless_functions.artifacts.sweeping import sweep
from rlhfless_functions.artifacts.uploads import combine, complete, uploading
