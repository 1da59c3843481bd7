"""KV blocks of past conversations, by content: in host memory, then on disk, least recently used out first."""
