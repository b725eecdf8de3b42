"""Names of functions without the paths of the job's own files: a hash stands for each path."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from pacekeeper_rank.profiling.function_names import OWN_FILE_PREFIX


def hide_own_path(name: str) -> str:
    """Replace the path of the job's own file by its hash: "./train.py:load" becomes "#3f2a91c0:load"."""
    if not name.startswith(OWN_FILE_PREFIX):
        return name
    path, _, function = name.rpartition(":")
    return f"{hash_path(path)}:{function}"


def hash_path(path: str) -> str:
    """Return the hash of the path of one of the job's own files."""
    return "#" + hashlib.blake2b(path.encode(errors="replace"), digest_size=4).hexdigest()


def map_path_hashes(names: Sequence[str]) -> Mapping[str, str]:
    """Return the paths for the hashes that `hide_own_path` puts into these names."""
    own_paths = sorted({name.rpartition(":")[0] for name in names if name.startswith(OWN_FILE_PREFIX)})
    return {hash_path(path): path for path in own_paths}
