"""Adapters of an engine: those that requests may use, that are being loaded and that leave."""

from collections.abc import Iterable, Set
from dataclasses import dataclass, field

from pdcluster_schema.ports import MAX_ADAPTERS
from pdcluster_schema.text import quoted
from pdcluster_worker.engine.ports import AdapterLoader, LoadedAdapter
from pdcluster_worker.engine.request import EngineRequest
from pdcluster_worker.errors import RequestError
from pdcluster_worker.messages.adapters import (
    AdapterReply,
    LoadAdapter,
    ResidentAdapters,
    UnloadAdapter,
)
from pdcluster_worker.messages.engine import EngineOutput, RequestFailed


@dataclass(slots=True)
class Adapters:
    """declared: of the model, for as long as the engine lives.  loader: None = no others come.

    An adapter that is unloaded takes no new requests, and goes with the last one that it has.
    """

    declared: Set[str]
    loader: AdapterLoader | None = None
    _weights: dict[str, str] = field(default_factory=dict)  # fingerprints, by name
    _loading: dict[str, int] = field(default_factory=dict)  # number of the call, by name
    _leaving: dict[str, int] = field(default_factory=dict)  # likewise

    def refusal(self, request: EngineRequest) -> RequestFailed | None:
        """Reason why a request of an adapter cannot run here."""
        name, reason = quoted(request.adapter), None
        if request.adapter_weights != self._weights.get(request.adapter, ""):
            reason = (
                f"adapter {name} was unloaded, or loaded with other weights, while the request was "
                "on its way: send it again, or load the adapter again"
            )
            return RequestFailed(request.request_id, reason, lacks_adapter=True)
        if request.adapter not in self.declared and request.adapter not in self._weights:
            known = ", ".join(sorted({*self.declared, *self._weights})) or "none"
            reason = (
                f"adapter {name} is not loaded here, which has {known}: give it in model.adapters"
            )
        elif not request.cache_salt:
            reason = (
                f"adapter {name} has no cache_salt, without which its KV would be found for the "
                "model: send the salt of its name"
            )
        if reason is None:
            return None
        return RequestFailed(request.request_id, reason, is_refusal=True)

    def handle(self, message: LoadAdapter | UnloadAdapter) -> list[EngineOutput]:
        """A refusal is answered at once, all else by `settle`."""
        return self._load(message) if isinstance(message, LoadAdapter) else self._unload(message)

    def _load(self, message: LoadAdapter) -> list[EngineOutput]:
        refusal = self._load_refusal(message.name)
        if refusal is not None:
            return [_refused(message.call, refusal)]
        assert self.loader is not None, "the server process refuses others"
        self._loading[message.name] = message.call
        self.loader.begin(message.name, message.path)
        return []

    def _unload(self, message: UnloadAdapter) -> list[EngineOutput]:
        name = message.name
        if name not in self._weights:
            return [_refused(message.call, self._unload_refusal(name))]
        del self._weights[name]
        self._leaving[name] = message.call
        return [self._resident()]

    def settle(self, requests: Iterable[EngineRequest]) -> list[EngineOutput]:
        """requests: all that live, and those of steps in flight."""
        assert self.loader is not None, "no other adapter comes"
        outputs: list[EngineOutput] = []
        for name, loaded in self.loader.take():
            call = self._loading.pop(name)
            if isinstance(loaded, LoadedAdapter):
                self._weights[name] = loaded.weights
                outputs += [self._resident(), self._done(call, loaded)]
            else:
                outputs.append(_refused(call, loaded))
        gone = self._leaving and self._leaving.keys() - {each.adapter for each in requests}
        for name in sorted(gone):
            self.loader.remove(name)
            outputs.append(self._done(self._leaving.pop(name), LoadedAdapter("", 0)))
        return outputs

    def _load_refusal(self, name: str) -> RequestError | None:
        if name in self._leaving:
            return _taken(f"adapter {quoted(name)} is being unloaded: load it again after that")
        if name in self.declared or name in self._weights or name in self._loading:
            return _taken(
                f"adapter {quoted(name)} is loaded already: unload it before, or give this one "
                "another name"
            )
        number = len({*self.declared, *self._weights, *self._loading, *self._leaving})
        if number >= MAX_ADAPTERS:
            return RequestError(
                f"{number} adapters are loaded, of at most {MAX_ADAPTERS}: unload one",
                code="too_many_adapters",
            )
        return None

    def _unload_refusal(self, name: str) -> RequestError:
        if name in self.declared:
            return RequestError(
                f"adapter {quoted(name)} is one of model.adapters, which stay: take it out of the "
                "PDCluster",
                param="lora_name",
            )
        state = "is not loaded here"
        if name in self._leaving:
            state = "is being unloaded"
        elif name in self._loading:
            state = "is still being loaded"
        known = ", ".join(sorted(self._weights)) or "none"
        return RequestError(
            f"adapter {quoted(name)} {state}: name one that was loaded while this engine runs, "
            f"{known}",
            status=404,
            code="adapter_not_found",
            param="lora_name",
        )

    def _resident(self) -> ResidentAdapters:
        return ResidentAdapters(dict(self._weights))

    def _done(self, call: int, loaded: LoadedAdapter) -> AdapterReply:
        assert self.loader is not None, "it has loaded"
        return AdapterReply(call, loaded.weights, loaded.num_bytes, self.loader.free_bytes)


def _taken(message: str) -> RequestError:
    return RequestError(message, code="adapter_exists", param="lora_name")


def _refused(call: int, error: RequestError) -> AdapterReply:
    return AdapterReply(
        call, refused=error.message, status=error.status, code=error.code, param=error.param
    )
