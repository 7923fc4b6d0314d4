import stream_attention
import stream_attention.flows


def test_flows_joins_the_namespace_of_core():
    assert stream_attention.flows.__name__ == "stream_attention.flows"
    assert any("flows" in entry for entry in stream_attention.__path__)


def test_flows_offers_no_name_that_it_does_not_implement():
    assert [name for name in vars(stream_attention.flows) if not name.startswith("_")] == []
