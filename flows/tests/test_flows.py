import stream_attention
import stream_attention.flows


def test_flows_joins_the_namespace_of_core():
    assert stream_attention.flows.__name__ == "stream_attention.flows"
    assert any("flows" in entry for entry in stream_attention.__path__)


def test_every_name_that_flows_offers_is_there():
    for name in stream_attention.flows.__all__:
        assert getattr(stream_attention.flows, name) is not None
