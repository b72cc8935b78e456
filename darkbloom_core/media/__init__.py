"""Pictures and videos of requests: ``data:`` URIs to pixels, bounded in size, time and memory."""

from darkbloom_core.media._source import MediaSource
from darkbloom_core.media._work import MediaJob, MediaWorkers, PreparedMedia

__all__ = ["MediaJob", "MediaSource", "MediaWorkers", "PreparedMedia"]
