import pytest

from pdcluster_schema.ports import join_address, parse_address


@pytest.mark.parametrize(
    ("address", "parts"),
    [
        ("10.0.0.1:9100", ("10.0.0.1", 9100)),
        ("[fd00::1]:1", ("fd00::1", 1)),
        ("worker-0.pods:65535", ("worker-0.pods", 65535)),
    ],
)
def test_parse_address_is_the_inverse_of_join_address(address, parts):
    assert parse_address(address) == parts
    assert join_address(*parts) == address


@pytest.mark.parametrize(
    "address",
    [
        "",
        "host",
        ":1",
        "[]:1",
        "::1:9100",
        "[host]:1",
        "h:0",
        "h:65536",
        "h:-1",
        "h:x",
        "h:²",
        "[::1]9",
    ],
)
def test_parse_address_refuses_and_names_what_it_cannot_split(address):
    with pytest.raises(ValueError, match="address"):
        parse_address(address)
