"""Hides tokens, keys and passwords in settings, command lines and messages, and cleans what others wrote."""

import re
from collections.abc import Sequence


HIDDEN = "(hidden)"

# Names of secrets in fields, dicts and options: hub_token, api-key, clientSecret, Authorization.
_NAME = re.compile(r"(token|key|secret|passw(or)?d|[_-]pwd|credentials?|authorization|auth|cookie)$", re.IGNORECASE)
# Values that are secrets by their form, and the parts of a URL that may hold secrets.
_FORMS = re.compile(
    r"\b(hf_|sk-|ghp_|github_pat_|wandb_v1_)[\w-]{16,}|(?i:\b(bearer|authorization:\s*\w+)\s+\S+)"
    r"|(?i:(?<=token=)|(?<=key=)|(?<=secret=)|(?<=password=))\S+"
)
_URL_PARTS = re.compile(r"(?<=://)[^\s/?#@]*@|(?<=[?&])[^\s=&#]+=[^\s&#]*")
# Control characters, those that turn the direction of writing, and halves of surrogate pairs.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_JSON_MEMBER = re.compile(rf'("[^"]*{_NAME.pattern.removesuffix("$")}"\s*:\s*)"[^"]*"', re.IGNORECASE)


def is_secret_name(name: str) -> bool:
    """Return whether a value of this name is a secret."""
    return _NAME.search(name) is not None


def without_secrets(text: str) -> str:
    """Return a text without what looks like a token, and with URLs without user and query."""
    text = _JSON_MEMBER.sub(rf'\1"{HIDDEN}"', text)
    return _URL_PARTS.sub("", _FORMS.sub(HIDDEN, text))


def require_open_address(url: str, name: str) -> str:
    """Return an address of a server; a ValueError says that it has a user, a password or a query."""
    if re.search("[@?#]", url):  # which part is the secret is not sure, so nothing is shown
        raise ValueError(
            f"{name}={HIDDEN!r} has a user, a password or a query, which logs and files would keep: use "
            "http://HOST:PORT. A key belongs in the variable VLLM_API_KEY, a user with a password in ~/.netrc."
        )
    return url


def printable(text: str) -> str:
    """Return a text of others with escapes for its control characters, such as \\x1b for ESC; lines and tabs stay."""
    return _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def hide_in_options(words: Sequence[str]) -> list[str]:
    """Return the words of a command line with "(hidden)" for the values of options such as `--api-key X Y`."""
    shown, hiding = [], False
    for word in words:
        if word.startswith("--") or (word.startswith("-") and not hiding):  # a key may begin with a dash
            name, equals, _ = word.partition("=")
            secret = is_secret_name(name)
            hiding = secret and not equals
            shown.append(f"{name}={HIDDEN}" if secret and equals else without_secrets(word))
        else:
            shown.append(HIDDEN if hiding else without_secrets(word))
    return shown


def secrets_in_options(words: Sequence[str]) -> list[str]:
    """Return the values that `hide_in_options` hides as a whole."""
    return [
        word.removeprefix(seen.removesuffix(HIDDEN))
        for word, seen in zip(words, hide_in_options(words), strict=True)
        if seen.endswith(HIDDEN) and word != seen
    ]
