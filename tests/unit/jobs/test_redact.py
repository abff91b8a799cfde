"""The one masker of secrets."""

from __future__ import annotations

import pytest

from jobs.formatting import redact


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("postgresql://u:p@ss:w@h:5/db", "postgresql://u:********@h:5/db"),
        ("postgresql+psycopg://u:p%40@h/db?x=1", "postgresql+psycopg://u:********@h/db?x=1"),
        ("redis://:p/a'ss@w@h:1/0", "redis://:********@h:1/0"),
        ("no 'redis://:pw@h/0', no s3://k:pw@b", "no 'redis://:********@h/0', no s3://k:********@b"),
        ("REDIS://:pw@h", "REDIS://:********@h"),
        ("postgresql://h/db?user=u&password=pw&x=1", "postgresql://h/db?user=u&password=********&x=1"),
        ("postgresql://h/db?sslpassword=pw", "postgresql://h/db?sslpassword=********"),
        (
            "GET 'https://s3/b/k?X-Amz-Signature=abc' failed",
            "GET 'https://s3/b/k?X-Amz-Signature=********' failed",
        ),
        ("redis://h:6379/0", "redis://h:6379/0"),
        ("file:///a/b", "file:///a/b"),
        ("https://example.org/a:b@c", "https://example.org/a:b@c"),
        ("s3://bucket/prefix", "s3://bucket/prefix"),
        ("password=1 is no URL", "password=1 is no URL"),
    ],
)
def test_passwords_of_urls_are_hidden(text: str, shown: str) -> None:
    assert redact(text) == shown
