"""The guard: what may be fetched, decided before and at every connection."""

import asyncio
import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perilune.public_web import NetworkPolicy, PublicResolver, Refused, checked, not_public

EVERY_PORT = NetworkPolicy(ports=frozenset(range(1, 65536)))

REFUSED_URLS = (
    """
http://127.0.0.1/
http://127.0.0.1:22/
http://127.1/
http://127.0.1/
http://0/
http://0.0.0.0/
http://2130706433/
http://017700000001/
http://0x7f000001/
http://0x7f.0.0.1/
http://0x7f.1/
http://0177.0.0.1/
http://127.0.0.1./
http://127.000.000.001/
http://00127.0.0.1/
http://1.2.3/
http://1.2.3.4.5/
http://256.256.256.256/
http://4294967296/
http://localhost/
http://LOCALHOST/
http://localhost./
http://localhost:80/
http://foo.localhost/
http://printer.local/
http://metadata.google.internal/computeMetadata/v1/
http://metadata/
http://kubernetes.default.svc.cluster.local/
http://intranet/
http://router.lan/
http://169.254.169.254/latest/meta-data/
http://169.254.170.2/v2/credentials
http://2852039166/
http://0xa9fea9fe/
http://0251.0376.0251.0376/
http://169.254.43518/
http://168.63.129.16/
http://100.100.100.200/latest/meta-data/
http://192.0.0.192/opc/v1/instance/
http://10.0.0.1/
http://172.16.0.1/
http://172.31.255.255/
http://192.168.1.1/
http://100.64.0.1/
http://198.18.0.1/
http://192.0.2.1/
http://203.0.113.9/
http://224.0.0.1/
http://239.255.255.250/
http://240.0.0.1/
http://255.255.255.255/
http://[::]/
http://[::1]/
http://[0:0:0:0:0:0:0:1]/
http://[::ffff:127.0.0.1]/
http://[::ffff:7f00:1]/
http://[::ffff:169.254.169.254]/
http://[::127.0.0.1]/
http://[::ffff:0:127.0.0.1]/
http://[64:ff9b::7f00:1]/
http://[64:ff9b::a9fe:a9fe]/
http://[64:ff9b:1::1]/
http://[2002:7f00:1::]/
http://[2002:a9fe:a9fe::1]/
http://[2001:0:4136:e378:8000:63bf:3fff:fdd2]/
http://[2001:db8::1]/
http://[fc00::1]/
http://[fd00:ec2::254]/
http://[fe80::1]/
http://[fe80::1%25eth0]/
http://[fec0::1]/
http://[ff02::1]/
http://[100::1]/
http://[3fff::1]/
http://[4000::1]/
http://[2607:f8b0::200:5efe:7f00:1]/
http://[::1/
http://[v1.x]/
http://１２７.0.0.1/
http://①②⑦.⓪.⓪.①/
http://127。0。0。1/
http://ⓛⓞⓒⓐⓛⓗⓞⓢⓣ/
http://user@example.com/
http://user:password@example.com/
http://example.com@127.0.0.1/
http://example.com:80@127.0.0.1/
http://127.0.0.1#@example.com/
http://127.0.0.1?@example.com/
http://example.com\\@127.0.0.1/
http://example.com\\.evil.org/
http:\\\\127.0.0.1\\
http:127.0.0.1/
http:/127.0.0.1/
http:///127.0.0.1/
//127.0.0.1/
http://127%2e0%2e0%2e1/
http://%31%32%37.0.0.1/
http://example%00.com/
http://exa mple.com/
http://example.com/a b
http://example.com:22/
http://example.com:6379/
http://example.com:0/
http://example.com:99999/
http://example.com:80:80/
http://example.com:８０/
http://example.com:-80/
http://.example.com/
http://example..com/
http://-example.com/
http:///
http://
https://
file:///etc/passwd
file://localhost/etc/passwd
ftp://example.com/
gopher://127.0.0.1:6379/_INFO
dict://127.0.0.1:11211/stats
ldap://example.com/
data:text/html,hello
javascript:alert(1)
jar:http://example.com!/
blob:http://example.com/x
view-source:http://example.com/
ws://example.com/
about:blank
example.com
""".strip("\n").split("\n")
    + [
        "http://127.0.0.1\t/",
        "http://exam\nple.com/",
        "http://example.com/\r\nHost: evil.org",
        "http://example.com/\x00",
        "\x01http://example.com/",
        "http://exa\u00admple.internal/",
        "http://example.com\u2028/",
        "http://example.com/" + "a" * 9000,
        "http://" + "a" * 64 + ".com/",
        "http://" + "a." * 130 + "com/",
        "",
    ]
)


def test_the_corpus_is_as_large_as_promised() -> None:
    assert len(set(REFUSED_URLS)) >= 120


@pytest.mark.parametrize("url", REFUSED_URLS)
def test_no_url_of_the_corpus_is_fetched_and_none_is_looked_up(url: str) -> None:
    looked_up: list[str] = []

    async def lookup(host: str) -> list[str]:
        looked_up.append(host)
        return ["93.184.215.14"]

    async def attempt() -> None:
        target = checked(url, NetworkPolicy())
        await PublicResolver(lookup=lookup).addresses(target.host)

    with pytest.raises(Refused):
        asyncio.run(attempt())
    assert looked_up == []


@pytest.mark.parametrize(
    "url, canonical",
    [
        ("https://example.org", "https://example.org/"),
        ("HTTPS://Example.ORG./a?b=c#d", "https://example.org/a?b=c"),
        ("https://example.org:443/", "https://example.org/"),
        ("http://example.org?q=ü", "http://example.org/?q=%C3%BC"),
        ("https://bücher.example/", "https://xn--bcher-kva.example/"),
        ("http://8.8.8.8/", "http://8.8.8.8/"),
        ("http://[2606:4700::1111]/", "http://[2606:4700::1111]/"),
        ("https://example.org/a%20b/%E2%82%AC", "https://example.org/a%20b/%E2%82%AC"),
        ("https://example.org/@user", "https://example.org/@user"),
    ],
)
def test_public_urls_pass_in_one_spelling(url: str, canonical: str) -> None:
    assert checked(url, NetworkPolicy()).url == canonical


@given(st.text(max_size=60))
def test_a_url_is_refused_or_canonical_whatever_its_text(tail: str) -> None:
    try:
        target = checked("http://" + tail, EVERY_PORT)
    except Refused:
        return
    assert checked(target.url, EVERY_PORT) == target
    assert target.url.isascii() and " " not in target.url


@given(st.ip_addresses(v=4))
def test_an_ipv4_address_in_disguise_is_never_public(address: ipaddress.IPv4Address) -> None:
    number = int(address)
    for disguise in (
        (0xFFFF << 32) | number,
        number,
        (0x64FF9B << 96) | number,
        (0x2002 << 112) | (number << 80) | 1,
        (0x20010000 << 96) | (number ^ 0xFFFFFFFF),
    ):
        assert not_public(ipaddress.IPv6Address(disguise)) is not None


@given(st.ip_addresses())
def test_what_python_calls_private_is_never_public(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> None:
    if not address.is_global or address.is_multicast or address.is_reserved:
        assert not_public(address) is not None


@pytest.mark.parametrize(
    "answer", [["127.0.0.1"], ["93.184.215.14", "10.0.0.1"], ["::ffff:10.0.0.1"], ["fe80::1%eth0"], []]
)
def test_a_name_with_one_private_address_is_refused(answer: list[str]) -> None:
    async def lookup(host: str) -> list[str]:
        return answer

    with pytest.raises(Refused):
        asyncio.run(PublicResolver(lookup=lookup).addresses("example.org"))


def test_a_url_with_a_password_is_refused_without_repeating_it() -> None:
    with pytest.raises(Refused, match="user or password") as refusal:
        checked("https://user:hunter2@example.org/", NetworkPolicy())
    assert "hunter2" not in str(refusal.value)


def test_lists_decide_before_any_lookup() -> None:
    policy = NetworkPolicy(
        allow=("example.org", "*.example.org", "data.example.com"),
        deny=("secret.example.org", "deep.example.org", "*.deep.example.org"),
    )
    for allowed in ("https://example.org/", "https://a.b.example.org/", "https://data.example.com/"):
        checked(allowed, policy)
    for refused in (
        "https://example.com/",
        "https://evilexample.org/",
        "https://example.org.evil.com/",
        "https://secret.example.org/",
        "https://deep.example.org/",
        "https://x.deep.example.org/",
        "https://8.8.8.8/",
    ):
        with pytest.raises(Refused, match="list"):
            checked(refused, policy)


def test_a_star_means_what_is_below_a_domain_and_not_the_domain() -> None:
    policy = NetworkPolicy(allow=("*.example.org",))
    checked("https://a.b.example.org/", policy)
    with pytest.raises(Refused, match="list"):
        checked("https://example.org/", policy)


@pytest.mark.parametrize(
    "pattern", ["*", "https://example.org", "example.org/", "*.*.org", "", "exa mple.org", "EXAMPLE.org"]
)
def test_a_pattern_that_would_not_mean_what_it_says_is_an_error(pattern: str) -> None:
    with pytest.raises(ValueError, match="expected a host"):
        NetworkPolicy(allow=(pattern,))


def test_a_redirect_is_relative_to_its_page() -> None:
    base = checked("https://example.org/a/b", NetworkPolicy())
    assert checked("../c", NetworkPolicy(), base=base).url == "https://example.org/c"
    assert checked("//example.com/", NetworkPolicy(), base=base).url == "https://example.com/"


@pytest.mark.parametrize("location", ["http://example.org/", "https://u:p@example.org/", "file:///etc/passwd", "//[/"])
def test_a_redirect_to_less_safety_is_refused(location: str) -> None:
    base = checked("https://example.org/a/b", NetworkPolicy())
    with pytest.raises(Refused):
        checked(location, NetworkPolicy(), base=base)
