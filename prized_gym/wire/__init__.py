"""Values and spaces as bytes, as they travel between a trainer and a sandbox that nobody trusts."""

from prized_gym.wire.codec import DEFAULT_LIMITS, Encoded, Limits, decode, encodable, encode, encode_info, encode_parts
from prized_gym.wire.errors import ProtocolError, RemoteError, WireError
from prized_gym.wire.spaces import check, default_value, space_from_data, space_to_data

__all__ = [
    "DEFAULT_LIMITS",
    "Encoded",
    "Limits",
    "ProtocolError",
    "RemoteError",
    "WireError",
    "check",
    "decode",
    "default_value",
    "encodable",
    "encode",
    "encode_info",
    "encode_parts",
    "space_from_data",
    "space_to_data",
]
