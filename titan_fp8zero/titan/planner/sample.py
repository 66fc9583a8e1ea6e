"""A bounded sample of many things, for tables and pictures that must stay readable."""


def sample(count: int, limit: int) -> list[int]:
    """At most `limit` (at least 2) of the indices below `count`, evenly spread, both ends in it."""
    if count <= limit:
        return list(range(count))
    return [index * (count - 1) // (limit - 1) for index in range(limit)]


def shown(count: int, of: int, things: str) -> str:
    """How a title says what part is shown."""
    return f"{of:,} {things}" if count == of else f"{count:,} of {of:,} {things} shown"
