import stream_attention
import stream_attention.policies


def test_policies_joins_the_namespace_of_core():
    assert stream_attention.policies.__name__ == "stream_attention.policies"
    assert any("policies" in entry for entry in stream_attention.__path__)


def test_policies_offers_no_name_that_it_does_not_implement():
    assert [name for name in vars(stream_attention.policies) if not name.startswith("_")] == []
