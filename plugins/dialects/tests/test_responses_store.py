"""What is kept of responses has bounds by count and by length."""

from darkbloom_dialects._options import DialectOptions
from darkbloom_dialects._responses_store import ResponseStore, StoredResponse
from hypothesis import given
from hypothesis import strategies as st

NAMES = st.sampled_from("abcdefgh")
STEPS = st.lists(
    st.tuples(st.just("put"), NAMES, st.integers(0, 60))
    | st.tuples(st.sampled_from(["get", "pop"]), NAMES, st.just(0)),
    max_size=60,
)


@given(steps=STEPS, count=st.integers(0, 5), length=st.integers(0, 100))
def test_no_more_is_kept_than_may_be_and_what_was_used_last_stays(steps, count, length) -> None:
    store = ResponseStore(DialectOptions(stored_responses=count, stored_bytes=length))
    model: dict[str, int] = {}  # the latest last
    for position, (step, name, size) in enumerate(steps):
        name = f"{name}{position}" if step == "put" else next((key for key in model if key[0] == name), name)
        if step == "put":
            store.put(StoredResponse({"id": name}, (), (), size))
            if size <= length:
                model[name] = size
                while len(model) > count or sum(model.values()) > length:
                    del model[next(iter(model))]
        elif step == "get":
            assert (store.get(name) is not None) == (name in model)
            if name in model:
                model[name] = model.pop(name)
        else:
            assert (store.pop(name) is not None) == (name in model)
            model.pop(name, None)
        assert len(store) == len(model)
        assert store.bytes == sum(model.values())
    assert all(store.get(name) for name in list(model))
