"""What a rollout worker is told that comes late is what the others have heard."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from miles_contracts import wire
from miles_loop.fleet_view import EngineState, FleetState, FleetView

URLS = ("http://a", "http://b", "http://c")
words = st.one_of(
    st.tuples(st.just("version"), st.integers(0, 9)),
    st.tuples(st.just("begin")),
    st.tuples(st.just("end")),
    st.tuples(st.just("quarantine"), st.sampled_from(URLS), st.sampled_from(["dead", "hung"])),
    st.tuples(st.just("readmit"), st.sampled_from(URLS), st.sampled_from(["http://new:1", "http://new:2"])),
)


@given(st.lists(words))
def test_the_state_is_the_last_word_on_each_matter(said: list[tuple[str, ...]]) -> None:
    view = FleetView([(url, url) for url in URLS])
    version, updates = None, 0
    quarantined: dict[str, str] = {}
    addresses = {url: url for url in URLS}
    for kind, *rest in said:
        match kind:
            case "version":
                version = int(rest[0])
                view.set_version(version)
            case "begin":
                updates += 1
                view.update_begins()
            case "end" if updates:
                updates -= 1
                view.update_ends()
            case "quarantine":
                quarantined[rest[0]] = rest[1]
                view.quarantine(*rest)
            case "readmit":
                quarantined.pop(rest[0], None)
                addresses[rest[0]] = rest[1]
                view.readmit(*rest)
    engines = tuple(EngineState(url=u, address=addresses[u], quarantine=quarantined.get(u)) for u in URLS)
    assert view.state == FleetState(engines=engines, version=version, updates=updates)
    assert wire.decode(wire.encode(view.state), FleetState) == view.state
