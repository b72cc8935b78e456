"""The plugin is honest: it loads, says that it is not available yet, and offers nothing."""

from darkbloom_core.plugins import PluginOptions, load_plugins


def test_it_loads_says_that_it_is_not_available_yet_and_offers_no_tier():
    plugins = load_plugins(PluginOptions(allow=frozenset({"ssd-tier"}), strict=True))
    (report,) = [report for report in plugins.report() if report.name == "ssd-tier"]
    assert report.state == "loaded"
    assert report.distribution == "darkbloom-ssd-tier"
    assert report.notice is not None
    assert report.notice.startswith("not available yet")
    assert report.hooks == ()
    assert plugins.cache_tiers() == ()
