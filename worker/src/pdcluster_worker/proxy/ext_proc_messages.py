"""Messages of Envoy's external processing: the fields that an endpoint picker reads or sets.

Numbers and types are those of envoy/service/ext_proc/v3/external_processor.proto, what it imports,
and grpc/health/v1/health.proto.  Enumerations are declared by their numbers and maps as their
entries, which is the same on the wire; fields that are not named here are skipped.
"""

from functools import lru_cache
from typing import Any

from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

DESTINATION = "x-gateway-destination-endpoint"
_SUBSET = ("envoy.lb.subset_hint", "x-gateway-destination-endpoint-subset")

BODY_BUFFERED, BODY_BUFFERED_PARTIAL, BODY_DUPLEX = 2, 3, 4
"""Ways in which a gateway sends a body: of `ProcessingMode.BodySendMode`."""
_OVERWRITE_OR_ADD = 2
_ECHO_BYTES = 64 << 10

_PACKAGE = "pdcluster.ext_proc"
_DECLARED = {
    "ProcessingRequest": "HttpHeaders request_headers = 2; HttpBody request_body = 4; "
    "HttpTrailers request_trailers = 6; Metadata metadata_context = 8; "
    "ProtocolConfiguration protocol_config = 11",
    "HttpHeaders": "bool end_of_stream = 3",
    "HttpBody": "bytes body = 1; bool end_of_stream = 2",
    "HttpTrailers": "",
    "ProtocolConfiguration": "int32 request_body_mode = 1",
    "Metadata": "repeated Namespace filter_metadata = 1",
    "Namespace": "string key = 1; Struct value = 2",
    "Struct": "repeated Field fields = 1",
    "Field": "string key = 1; Value value = 2",
    "Value": "string string_value = 3; Struct struct_value = 5; ListValue list_value = 6",
    "ListValue": "repeated Value values = 1",
    "ProcessingResponse": "HeadersResponse request_headers = 1; BodyResponse request_body = 3; "
    "TrailersResponse request_trailers = 5; ImmediateResponse immediate_response = 7; "
    "Struct dynamic_metadata = 8",
    "HeadersResponse": "CommonResponse response = 1",
    "BodyResponse": "CommonResponse response = 1",
    "TrailersResponse": "",
    "CommonResponse": "HeaderMutation header_mutation = 2; BodyMutation body_mutation = 3",
    "HeaderMutation": "repeated HeaderValueOption set_headers = 1",
    "HeaderValueOption": "HeaderValue header = 1; int32 append_action = 3",
    "HeaderValue": "string key = 1; bytes raw_value = 3",
    "BodyMutation": "StreamedBodyResponse streamed_response = 3",
    "StreamedBodyResponse": "bytes body = 1; bool end_of_stream = 2",
    "ImmediateResponse": "HttpStatus status = 1; HeaderMutation headers = 2; bytes body = 3; "
    "string details = 5",
    "HttpStatus": "int32 code = 1",
    "HealthCheckRequest": "string service = 1",
    "HealthCheckResponse": "int32 status = 1",
}
_SCALARS = {
    "bool": FieldDescriptorProto.TYPE_BOOL,
    "bytes": FieldDescriptorProto.TYPE_BYTES,
    "int32": FieldDescriptorProto.TYPE_INT32,
    "string": FieldDescriptorProto.TYPE_STRING,
}


def _declare() -> dict[str, Any]:
    """A class for each message."""
    file = FileDescriptorProto(name="ext_proc.proto", package=_PACKAGE, syntax="proto3")
    for name, declared in _DECLARED.items():
        message = file.message_type.add(name=name)
        for text in filter(None, declared.split("; ")):
            *repeated, kind, field, _, number = text.split()
            added = message.field.add(name=field, number=int(number))
            added.label = (
                FieldDescriptorProto.LABEL_REPEATED
                if repeated
                else FieldDescriptorProto.LABEL_OPTIONAL
            )
            added.type = _SCALARS.get(kind, FieldDescriptorProto.TYPE_MESSAGE)
            if kind not in _SCALARS:
                added.type_name = f".{_PACKAGE}.{kind}"
    pool = DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return {
        name: GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}"))
        for name in _DECLARED
    }


_CLASSES = _declare()
_Request, _Response = _CLASSES["ProcessingRequest"], _CLASSES["ProcessingResponse"]


def parse_request(message: bytes) -> Any:
    """A ProcessingRequest.  Raises ValueError."""
    return _parse(_Request, message)


def parse_health(message: bytes) -> str:
    """The service that a HealthCheckRequest asks for.  Raises ValueError."""
    return str(_parse(_CLASSES["HealthCheckRequest"], message).service)


def _parse(message_class: Any, message: bytes) -> Any:
    try:
        return message_class.FromString(message)
    except DecodeError as e:
        raise ValueError(f"not a {message_class.DESCRIPTOR.name}: {e}") from e


def health(*, is_serving: bool) -> bytes:
    """A HealthCheckResponse."""
    return _bytes(_CLASSES["HealthCheckResponse"](status=1 if is_serving else 2))


def subset_of(request: Any) -> frozenset[str] | None:
    """Endpoints that the gateway bounds the choice to; None = it does not."""
    space, name = _SUBSET
    for entry in request.metadata_context.filter_metadata:
        if entry.key == space:
            for field in entry.value.fields:
                if field.key == name:
                    listed = (each.string_value for each in field.value.list_value.values)
                    return frozenset((*listed, *field.value.string_value.split(","))) - {""}
    return None


def _bytes(message: Any) -> bytes:
    content: bytes = message.SerializeToString()
    return content


HEADERS = _bytes(_Response(request_headers={}))
TRAILERS = _bytes(_Response(request_trailers={}))
"""Answers that change nothing."""


def echo(body: bytes, *, is_end: bool) -> bytes:
    """A part of the body as it came, which a gateway that streams both ways waits for."""
    streamed = {"body": body, "end_of_stream": is_end}
    mutation = {"body_mutation": {"streamed_response": streamed}}
    return _bytes(_Response(request_body={"response": mutation}))


def echoes(body: bytes, *, is_end: bool) -> list[bytes]:
    starts = range(0, len(body), _ECHO_BYTES) or (0,)
    return [
        echo(body[start : start + _ECHO_BYTES], is_end=is_end and start + _ECHO_BYTES >= len(body))
        for start in starts
    ]


@lru_cache(maxsize=4096)
def chosen(phase: str, address: str) -> bytes:
    """The choice of an endpoint.  phase: field of the message that this answers."""
    response = {"header_mutation": _set({DESTINATION: address})}
    field = {"key": DESTINATION, "value": {"string_value": address}}
    metadata = {"key": "envoy.lb", "value": {"struct_value": {"fields": [field]}}}
    return _bytes(
        _Response(**{phase: {"response": response}}, dynamic_metadata={"fields": [metadata]})
    )


def refusal(status: int, headers: dict[str, str], body: bytes, reason: str) -> bytes:
    """The gateway answers so by itself.  reason: for its access log."""
    return _bytes(
        _Response(
            immediate_response={
                "status": {"code": status},
                "headers": _set(headers),
                "body": body,
                "details": reason,
            }
        )
    )


def _set(headers: dict[str, str]) -> dict[str, Any]:
    options = [
        {
            "header": {"key": name, "raw_value": value.encode()},
            "append_action": _OVERWRITE_OR_ADD,
        }
        for name, value in headers.items()
    ]
    return {"set_headers": options}
