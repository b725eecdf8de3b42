"""The first module of the user that each Python process of a watched container runs.

PYTHONPATH leads here. This file runs under Python 2.7 and each Python 3, costs next to nothing, and raises nothing of
its own. It restores the PYTHONPATH of the image, registers the import hook, and then runs the image's own
`sitecustomize` as if this one did not exist.
"""

import os
import sys

OLDEST_WATCHED_PYTHON = (3, 9)
PACKAGE = "_pacekeeper_rank"
LIBRARY_FOLDER = "importlib_bootstrap"
MAX_RECORDED_BYTES = 1 << 16
KUBEFLOW_PREFIX = "KUBEFLOW_TRAINER_SERVER_"


def _start_watching():
    folder = os.path.dirname(os.path.abspath(__file__))
    try:
        _restore_image_path(folder)
        if sys.version_info >= OLDEST_WATCHED_PYTHON and os.environ.get("PACEKEEPER_WATCH") != "0":
            _name_progress_server(os.path.dirname(folder))
            _register_import_hook(os.path.join(os.path.dirname(folder), LIBRARY_FOLDER, PACKAGE))
    except Exception as error:  # the process runs as if it were not watched
        if os.environ.get("PACEKEEPER_WATCH_DEBUG"):
            sys.stderr.write("pacekeeper: this process is not watched: %r\n" % (error,))
    return folder


def _restore_image_path(folder):
    """Insert the image's PYTHONPATH after `folder`, in sys.path and for child processes.

    A variable of the pod hides the image's variable of the same name. An init container has recorded it in a file.
    """
    name = os.environ.get("PACEKEEPER_IMAGE_PYTHONPATH")
    if not name or not os.path.isfile(name):
        return
    with open(name) as file:
        recorded = file.read(MAX_RECORDED_BYTES).strip()
    present = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    missing = [entry for entry in recorded.split(os.pathsep) if entry and entry not in present]
    if missing:
        _insert_after(sys.path, folder, [entry for entry in missing if entry not in sys.path])
        _insert_after(present, folder, missing)
        os.environ["PYTHONPATH"] = os.pathsep.join(present)


def _insert_after(entries, folder, missing):
    position = 0
    for index, entry in enumerate(entries):
        if entry and os.path.abspath(entry) == folder:
            position = index + 1
            break
    entries[position:position] = missing


def _name_progress_server(payload):
    """Have transformers report its progress to the sidecar, unless the job has variables of a server of its own.

    With a proxy for http, the reports would leave the pod.
    """
    url = os.environ.get("PACEKEEPER_KUBEFLOW_URL")
    names = list(os.environ) if url else []
    if not url or any(name.startswith(KUBEFLOW_PREFIX) or name.lower() == "http_proxy" for name in names):
        return
    os.environ[KUBEFLOW_PREFIX + "URL"] = url
    os.environ[KUBEFLOW_PREFIX + "TOKEN"] = os.path.join(payload, "kubeflow_token")


def _register_import_hook(package):
    """Load the library under a name of its own, so that sys.path stays as it is. importlib.util would cost more."""
    from importlib._bootstrap import module_from_spec
    from importlib._bootstrap_external import spec_from_file_location

    path = os.path.join(package, "__init__.py")
    spec = spec_from_file_location(PACKAGE, path, submodule_search_locations=[package])
    module = module_from_spec(spec)
    sys.modules[PACKAGE] = module
    try:
        spec.loader.exec_module(module)
        from _pacekeeper_rank.watching.bootstrap import prepare_process

        prepare_process()
    except BaseException:
        sys.modules.pop(PACKAGE, None)
        raise


def _run_image_module(folder):
    """Run the `sitecustomize` that this one hides. What it raises is raised here."""
    entries = [entry for entry in sys.path if os.path.abspath(entry or ".") != folder]
    if sys.version_info >= (3, 5):
        from importlib._bootstrap import module_from_spec
        from importlib._bootstrap_external import PathFinder

        spec = PathFinder.find_spec("sitecustomize", entries)
        if spec is None or spec.loader is None:
            return
        module = module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)
    else:
        import imp

        try:
            found = imp.find_module("sitecustomize", entries)
        except ImportError:
            return
        del sys.modules["sitecustomize"]
        imp.load_module("sitecustomize", *found)


_run_image_module(_start_watching())
