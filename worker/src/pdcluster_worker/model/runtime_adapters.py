"""LoRA adapters that come and go while an engine runs: read and packed in a thread of their own,
so that no step waits, and put into the decoder between two steps.
"""

import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue

import torch

from pdcluster_schema.text import shortened
from pdcluster_worker.config.worker import RuntimeAdaptersConfig
from pdcluster_worker.engine.ports import LoadedAdapter
from pdcluster_worker.errors import ModelError, RequestError
from pdcluster_worker.model.decoder import Decoder
from pdcluster_worker.model.decoder_loader import pack_adapter
from pdcluster_worker.model.loading.adapter import CONFIG, WEIGHTS, AdapterTarget, open_adapter
from pdcluster_worker.model.ops.adapters import PackedAdapter

logger = logging.getLogger(__name__)

NICENESS = 10  # of the thread: the engine's steps need the cores more

_PATH = "lora_path"
_LARGEST_NUMBER = 8  # bytes of a weight in a file
_Read = tuple[LoadedAdapter, PackedAdapter]


class RuntimeAdapters:
    """places: numbers by which plans name adapters, those of `model.adapters` first."""

    def __init__(
        self,
        settings: RuntimeAdaptersConfig,
        target: AdapterTarget,
        decoder: Decoder,
        places: dict[str, int],
    ) -> None:
        self.on_change: Callable[[], None] = lambda: None  # called by the thread
        self._settings = settings
        self._target = target
        self._decoder = decoder
        self._places = places
        self._bytes: dict[str, int] = {}  # packed, by name; changed under the lock
        self._lock = threading.Lock()
        self._queue: SimpleQueue[tuple[str, str]] = SimpleQueue()
        self._read: deque[tuple[str, _Read | RequestError]] = deque()
        self._thread: threading.Thread | None = None

    @property
    def free_bytes(self) -> int:
        with self._lock:
            return self._settings.memory - sum(self._bytes.values())

    def begin(self, name: str, path: str) -> None:
        """Read it in its turn."""
        self._queue.put((name, path))
        if self._thread is None:  # a daemon: a read that hangs does not keep the process
            self._thread = threading.Thread(target=self._run, name="adapters", daemon=True)
            self._thread.start()

    def take(self) -> list[tuple[str, LoadedAdapter | RequestError]]:
        """Those that were read since; the next step may have their rows."""
        found: list[tuple[str, LoadedAdapter | RequestError]] = []
        while self._read:
            name, read = self._read.popleft()
            if isinstance(read, RequestError):
                found.append((name, read))
                continue
            loaded, packed = read
            self._place(name, packed)
            logger.info(
                "loaded adapter name=%s weights=%s bytes=%d",
                *(name, loaded.weights, loaded.num_bytes),
            )
            found.append((name, loaded))
        return found

    def remove(self, name: str) -> None:
        """No step has its rows any more."""
        adapters = list(self._decoder.adapters)
        adapters[self._places.pop(name)] = None
        self._decoder.adapt(adapters)
        with self._lock:
            del self._bytes[name]
        logger.info("unloaded adapter name=%s", name)

    def _place(self, name: str, packed: PackedAdapter) -> None:
        """Numbers of the others stay: a step that is prepared has them."""
        adapters = list(self._decoder.adapters)
        place = adapters.index(None) if None in adapters else len(adapters)
        adapters[place:place] = [] if place < len(adapters) else [None]
        adapters[place] = packed
        self._decoder.adapt(adapters)
        self._places[name] = place

    # --- in the thread ---

    def _run(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        torch.set_num_threads(1)
        while True:
            name, path = self._queue.get()
            self._read.append((name, self._outcome(name, path)))
            self.on_change()

    def _outcome(self, name: str, path: str) -> _Read | RequestError:
        """The thread keeps nothing of it while it waits for the next one."""
        try:
            return self._load(name, path)
        except RequestError as e:
            return e
        except ModelError as e:
            return RequestError(str(e), param=_PATH)
        except OSError as e:
            message = f"adapter {name} cannot be read from {shortened(path, 200)}: {e.strerror}"
            return RequestError(
                f"{message}: give a folder below {self._settings.path} that the worker may read",
                param=_PATH,
            )
        except Exception as e:
            logger.exception("adapter failed name=%s", name)
            message = f"adapter {name} cannot be loaded: {type(e).__name__}: {e}"
            return RequestError(message, status=500, code="adapter_failed")

    def _load(self, name: str, path: str) -> _Read:
        folder = self._folder(path)
        file = folder / WEIGHTS
        # before it is read: what its weights take at least
        self._check_fits(name, file.stat().st_size // _LARGEST_NUMBER if file.exists() else 0)
        adapter = open_adapter(name, folder, self._target)
        num_bytes = adapter.num_elements * self._target.dtype.itemsize
        self._check_fits(name, num_bytes)
        packed = pack_adapter(adapter, self._target, self._decoder.operations)
        with self._lock:
            self._bytes[name] = num_bytes
        return LoadedAdapter(adapter.fingerprint, num_bytes), packed

    def _check_fits(self, name: str, needed: int) -> None:
        if needed > (free := self.free_bytes):
            raise RequestError(
                f"adapter {name} needs {needed} bytes, and {free} of the {self._settings.memory} "
                "bytes of model.runtimeAdapters.memory are free: unload another one, or raise it",
                code="adapter_memory",
                param=_PATH,
            )

    def _folder(self, path: str) -> Path:
        """Raises RequestError for one that is, or leads, outside."""
        root = Path(self._settings.path).expanduser().resolve()
        folder = (root / path).resolve()
        found = [folder, *((folder / name).resolve() for name in (CONFIG, WEIGHTS))]
        if folder == root or not all(each.is_relative_to(root) for each in found):
            raise RequestError(
                f"{_PATH} {path!r} is not below {root}, model.runtimeAdapters.path: give a folder "
                "in it",
                param=_PATH,
            )
        return folder
