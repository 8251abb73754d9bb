"""The messages of Envoy's `ext_proc` v3 that are read or written here, as protobuf classes made at run time.

The packages that carry Envoy's own classes bring their copy of `opentelemetry.proto` along, over the one that trace
export needs. Numbers are Envoy 1.40's (api/envoy/service/ext_proc/v3, api/envoy/config/core/v3). Fields left out are
skipped when read, as protobuf does with any it does not know.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, struct_pb2

Message = Any
"""One of the classes below: they exist only at run time."""

NO_BODY, _STREAMED, BUFFERED, _PARTIAL, FULL_DUPLEX = range(5)
"""ProcessingMode.BodySendMode"""
OVERWRITE = 2
"""HeaderValueOption.HeaderAppendAction: OVERWRITE_IF_EXISTS_OR_ADD"""

_PACKAGE = "kv_router.ext_proc"
_STRUCT = struct_pb2.Struct.DESCRIPTOR.full_name
_FIELDS: dict[str, str] = {
    "HeaderValue": "key:string=1 value:string=2 raw_value:bytes=3",
    "HeaderMap": "headers:HeaderValue*=1",
    "HeaderValueOption": "header:HeaderValue=1 append_action:int32=3",
    "HeaderMutation": "set_headers:HeaderValueOption*=1 remove_headers:string*=2",
    "HttpHeaders": "headers:HeaderMap=1 end_of_stream:bool=3",
    "HttpBody": "body:bytes=1 end_of_stream:bool=2",
    "HttpTrailers": "trailers:HeaderMap=1",
    "FilterMetadataEntry": "key:string=1 value:Struct=2",
    "Metadata": "filter_metadata:FilterMetadataEntry*=1",
    "ProtocolConfiguration": "request_body_mode:int32=1 response_body_mode:int32=2",
    "StreamedBodyResponse": "body:bytes=1 end_of_stream:bool=2",
    "BodyMutation": "mutation/body:bytes=1 mutation/streamed_response:StreamedBodyResponse=3",
    "CommonResponse": "header_mutation:HeaderMutation=2 body_mutation:BodyMutation=3",
    "HeadersResponse": "response:CommonResponse=1",
    "BodyResponse": "response:CommonResponse=1",
    "TrailersResponse": "header_mutation:HeaderMutation=1",
    "HttpStatus": "code:int32=1",
    "ImmediateResponse": "status:HttpStatus=1 headers:HeaderMutation=2 body:bytes=3 details:string=5",
    "ProcessingRequest": "request/request_headers:HttpHeaders=2 request/response_headers:HttpHeaders=3"
    " request/request_body:HttpBody=4 request/response_body:HttpBody=5 request/request_trailers:HttpTrailers=6"
    " request/response_trailers:HttpTrailers=7 metadata_context:Metadata=8 protocol_config:ProtocolConfiguration=11",
    "ProcessingResponse": "response/request_headers:HeadersResponse=1 response/response_headers:HeadersResponse=2"
    " response/request_body:BodyResponse=3 response/response_body:BodyResponse=4"
    " response/request_trailers:TrailersResponse=5 response/response_trailers:TrailersResponse=6"
    " response/immediate_response:ImmediateResponse=7 dynamic_metadata:Struct=8",
}
"""`[oneof/]name:type[*]=number`, where `*` means repeated. Enumerations are int32, as they are on the wire."""
_SCALARS = {
    "string": descriptor_pb2.FieldDescriptorProto.TYPE_STRING,
    "bytes": descriptor_pb2.FieldDescriptorProto.TYPE_BYTES,
    "bool": descriptor_pb2.FieldDescriptorProto.TYPE_BOOL,
    "int32": descriptor_pb2.FieldDescriptorProto.TYPE_INT32,
}


def _add_field(message: descriptor_pb2.DescriptorProto, text: str) -> None:
    name, _, rest = text.partition(":")
    kind, _, number = rest.partition("=")
    oneof, _, name = name.rpartition("/")
    field = message.field.add(name=name, number=int(number))
    field.label = field.LABEL_REPEATED if kind.endswith("*") else field.LABEL_OPTIONAL
    kind = kind.rstrip("*")
    if kind in _SCALARS:
        field.type = _SCALARS[kind]
    else:
        field.type = field.TYPE_MESSAGE
        field.type_name = f".{_STRUCT}" if kind == "Struct" else f".{_PACKAGE}.{kind}"
    if oneof:
        if not message.oneof_decl:
            message.oneof_decl.add(name=oneof)
        field.oneof_index = 0


def _classes() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="kv_router/ext_proc.proto", package=_PACKAGE, syntax="proto3")
    file.dependency.append(struct_pb2.DESCRIPTOR.name)
    for name, fields in _FIELDS.items():
        message = file.message_type.add(name=name)
        for text in fields.split():
            _add_field(message, text)
    pool = descriptor_pool.Default()
    pool.AddSerializedFile(file.SerializeToString())
    found = pool.FindFileByName(file.name)
    return {name: message_factory.GetMessageClass(found.message_types_by_name[name]) for name in _FIELDS}


_made = _classes()
HttpHeaders: Any = _made["HttpHeaders"]
HttpBody: Any = _made["HttpBody"]
HttpTrailers: Any = _made["HttpTrailers"]
HeadersResponse: Any = _made["HeadersResponse"]
BodyResponse: Any = _made["BodyResponse"]
TrailersResponse: Any = _made["TrailersResponse"]
ImmediateResponse: Any = _made["ImmediateResponse"]
ProcessingRequest: Any = _made["ProcessingRequest"]
ProcessingResponse: Any = _made["ProcessingResponse"]
