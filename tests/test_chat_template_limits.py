"""Templates that would not end, would not stop growing, or would leave the sandbox."""

import gc
import resource
import time
from collections.abc import Iterator

import pytest

from nanovllm_cli.errors import TemplateError
from nanovllm_cli.text.chat_template import MAX_SOURCE_CHARS, ChatTemplate

STATIC = "x" * 60_000
NS = "{% set ns = namespace(x=SEED) %}{% for i in range(99) %}{% set ns.x = STEP %}{% endfor %}"


def grow(seed: str, step: str, end: str = "") -> str:
    return NS.replace("SEED", seed).replace("STEP", step) + end


ENDLESS = {
    "a huge range": "{% for i in range(10**9) %}x{% endfor %}",
    "nested loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "a filtered loop": "{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}{% endfor %}",
    "a recursive loop": "{% for i in [1,2,3] recursive %}{{ loop([1,2,3,4,5,6]) if loop.depth < 30 }}{% endfor %}",
    "a recursive macro": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "an exponential macro": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "a block in itself": "{% block a %}{{ self.a() }}{% endblock %}",
    "mapped filters": "{% for i in range(9999) %}{% set x = range(99999) | map('string') | list %}{% endfor %}",
}
LARGE = {
    "a product": "{{ 'a' * 10**10 }}",
    "a constant product": "{{ 'a' * 10000000000 }}",
    "a list product": "{{ [1] * 10**9 }}",
    "doubling by +": grow("'ab'", "ns.x + ns.x"),
    "doubling by ~": grow("'ab'", "ns.x ~ ns.x"),
    "doubling a list": grow("[1]", "ns.x + ns.x"),
    "a list of itself": grow("['lol']", "[ns.x, ns.x, ns.x, ns.x]", "{{ ns.x }}"),
    "a product of itself": grow("['lol']", "[ns.x] * 10", "{{ ns.x | tojson }}"),
    "a dict of itself": grow("{}", "{'a': ns.x, 'b': ns.x}", "{{ ns.x | string }}"),
    "a dict call of itself": grow("{}", "dict(a=ns.x, b=ns.x)", "{{ ns.x ~ '' }}"),
    "a tuple as a key": grow("(1,)", "(ns.x, ns.x)", "{{ {ns.x: 1} }}"),
    "squaring": grow("10", "ns.x * ns.x"),
    "a power": "{{ 10 ** (10 ** 9) }}",
    "the center filter": "{{ 'a' | center(1000000000) }}",
    "ljust": "{{ 'a'.ljust(10**10) }}",
    "zfill": "{{ '1'.zfill(10**10) }}",
    "expandtabs": "{{ ('\\t' * 1000).expandtabs(10**9) }}",
    "a wide format": "{{ '{:1000000000}'.format('a') }}",
    "a computed format": "{{ '{:{w}}'.format('a', w=10**9) }}",
    "a wide percent": "{{ '%1000000000d' % 1 }}",
    "a computed percent": "{{ '%*d' % (1000000000, 1) }}",
    "a value in many fields": "{{ ('{0}' * 99999).format('b' * 99999) }}",
    "what a value of a format holds": "{{ ('{0.x}' * 99999).format(namespace(x='b' * 99999)) }}",
    "the format filter": "{{ '%1000000000d' | format(1) }}",
    "a wide percent behind a key with one": "{{ '%(a%b)1000000000d' % {'a%b': 1} }}",
    "a wide percent behind a key in brackets": "{{ '%((a))1000000000d' % {'(a)': 1} }}",
    "a wide percent of bytes": "{{ '%1000000000d'.encode() % 1 }}",
    "a value that is often formatted": "{{ ('%(a)s' * 99999) % {'a': 'b' * 99999} }}",
    "a value that the format filter is often given": "{{ ('%(a)s' * 99999) | format(a='b' * 99999) }}",
    "a wide format in other digits": "{{ '{:\u0661000000000}'.format('a') }}",
    "replace": "{{ ('a' * 1000000).replace('a', 'b' * 1000000) }}",
    "the replace filter": "{{ ('a' * 1000000) | replace('a', 'b' * 1000000) }}",
    "a join of a range": "{{ range(99999) | join('b' * 1000000) }}",
    "a join of references": "{{ ([{'x': 'b' * 1000000}] * 9999) | map(attribute='x') | join }}",
    "a join of values": "{{ dict(a='b' * 1000000, c='b' * 1000000).values() | list * 99 | join }}",
    "joining by a method": "{{ ('b' * 1000000).join(['a'] * 99999) }}",
    "joining references by a method": "{% set ns = namespace(x='b' * 1000000) %}{{ ''.join([ns] * 9999 | map(attribute='x')) }}",
    "a join by a long name": "{{ range(99999) | join(d='b' * 1000000) }}",
    "mapped centers": "{{ range(99999) | map('string') | map('center', 99999) | list }}",
    "text in a loop": "{% for i in range(99999) %}" + STATIC + "{% endfor %}",
    "text in a macro's loop": "{% macro f() %}{% for i in range(99999) %}"
    + STATIC
    + "{% endfor %}{% endmacro %}{{ f()|length }}",
    "text in a recursive loop": "{% for i in range(999) recursive %}" + STATIC + "{{ loop(range(999)) }}{% endfor %}",
    "a captured block": "{% set x %}{% for i in range(99999) %}{{ 'y' * 1000 }}{% endfor %}{% endset %}",
    "an indented block": "{{ ('\\n' * 1000000) | indent(1000000) }}",
    "indented JSON": "{{ [1] | tojson(indent=1000000000) }}",
    "a batch": "{{ [1] | batch(1000000000, 0) | list }}",
    "a batch by its name": "{{ [1] | batch(linecount=1000000000, fill_with=0) | list }}",
    "slices": "{{ [1] | slice(1000000000) | list }}",
    "slices by their name": "{{ [1] | slice(slices=1000000000) | list }}",
    "very exact rounding": "{{ 1 | round(1000000000, 'ceil') }}",
    "rounding to very many": "{{ 1 | round(precision=-1000000000) }}",
    "a long date": "{{ strftime_now('%1000000000Y') }}",
    "comparing long lists": "{% set a = [0] * 3000000 %}{% set b = [0] * 3000000 %}" + "{{ a == b }}" * 3000,
    "searching references": "{% set l = [('a' * 1000000) + 'b'] * 99999 %}{{ ('a' * 1000000 + 'c') in l }}",
    "sorting references": "{% set l = ([('a'*1000000) + 'b', ('a'*1000000) + 'c']) * 49999 %}{% set x = l | sort %}",
    "copying slices": "{% set a = 'a' * 2000000 %}" + "{% set b = a[1:] %}" * 4000,
    "summing lists": "{{ ([[1] * 999] * 9999) | sum(start=[]) | length }}",
}
OUTSIDE = {
    "a class": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "a frame": "{{ raise_exception.__globals__['json'] }}",
    "a method's globals": "{{ cycler.__init__.__globals__ }}",
    "an import": "{% import 'os' as x %}",
    "an include": "{% include '/etc/passwd' %}",
    "a mutation": "{% set x = [] %}{{ x.extend([1]) }}",
    "a mutation of a mapping": "{% set x = {} %}{{ x.update(a=1) }}",
    "a list within itself": "{% set x = [] %}{% set y = x.append(x) %}{{ x }}",
    "a list within itself as JSON": "{% set x = [] %}{% set y = x.append(x) %}{{ x | tojson }}",
    "a list that grows and grows": "{% set x = [] %}{% for i in range(99999) %}{% for j in range(99999) %}"
    "{% set y = x.append(x) %}{% endfor %}{% endfor %}",
    "a namespace's insides": "{% set ns = namespace(__class__=1) %}",
    "bytes of a number": "{{ (1).to_bytes(10**10, 'big') }}",
    "a sum of lists": "{{ [[1], [2]] | sum(start=[]) }}",
    "lorem ipsum": "{{ lipsum(n=1000000) }}",
    "loading attributes": "{{ ('' | attr('__class__')).x }}",
}


@pytest.fixture(autouse=True)
def bounded_memory() -> "object":
    """Whatever slips through fails here instead of taking the machine along."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()  # noqa: SIM115
    resource.setrlimit(resource.RLIMIT_AS, (used + (512 << 20), hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@pytest.fixture
def without_collector() -> Iterator[None]:
    """Its time is not the template's: see the test of that."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("name", [*ENDLESS, *LARGE])
def test_templates_without_end_are_stopped(name: str, without_collector: None) -> None:
    source = ENDLESS.get(name) or LARGE[name]
    template = ChatTemplate(source, max_seconds=0.3)
    before = time.thread_time()
    with pytest.raises(TemplateError) as caught:
        template.render([])
    assert time.thread_time() - before < 1.5
    assert "MemoryError" not in caught.value.message


def test_time_of_the_collector_is_not_the_templates(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process with millions of objects may be walked through for a second in the midst of a rendering."""

    def slow(phase: str, info: dict[str, int]) -> None:
        end = time.thread_time() + (0.02 if phase == "start" else 0.0)
        while time.thread_time() < end:
            pass

    def collecting(value: object) -> str:
        gc.callbacks.append(slow)
        gc.collect(0)  # the whole heap of a process that has run other tests takes a second
        gc.callbacks.remove(slow)
        return str(value)

    template = ChatTemplate("{% for i in range(20) %}{{ messages | tojson }}{% endfor %}", max_seconds=0.2)
    monkeypatch.setitem(template._template.environment.filters, "tojson", collecting)
    assert template.render([]) == "[]" * 20


@pytest.mark.parametrize("name", list(OUTSIDE))
def test_templates_stay_in_the_sandbox(name: str) -> None:
    with pytest.raises(TemplateError):
        ChatTemplate(OUTSIDE[name]).render([])


def test_a_template_may_collect_in_its_own_lists() -> None:
    source = (
        "{% set q = namespace(ids=[]) %}{% for m in messages %}{% set _ = q.ids.append(m.content) %}{% endfor %}"
        "{{ q.ids.pop(0) }} {{ q.ids | join }} {{ messages | length }}"
    )
    given = [{"role": "user", "content": word} for word in "abc"]
    assert ChatTemplate(source).render(given) == "a bc 3"
    assert [each["content"] for each in given] == ["a", "b", "c"]


def test_unsafe_attributes_are_undefined() -> None:
    assert ChatTemplate("{{ ''|attr('__class__') }}{{ '{0.__class__}'.format('') }}").render([]) == ""


@pytest.mark.parametrize(
    "source",
    [
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{{ " + "not " * 20000 + "1 }}",
        "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
        "{% for i in [1] %}" * 50 + "{% endfor %}" * 50,
        "{{ a" + ".b" * 30000 + " }}",
        "x" * (MAX_SOURCE_CHARS + 1),
    ],
)
def test_templates_too_deep_or_too_long_do_not_compile(source: str) -> None:
    with pytest.raises(TemplateError):
        ChatTemplate(source)


def test_a_long_conversation_is_no_attack() -> None:
    source = (
        "{% for m in messages %}{% if m == messages[-1] %}!{% endif %}{% for later in messages[loop.index:][:3] %}."
        "{% endfor %}{{ '<' + m.role + '>' + (m.content | trim) + '\\n' }}{% endfor %}"
    )
    messages = [{"role": "user", "content": "word " * 2000}] * 300  # 3 MB
    assert len(ChatTemplate(source).render(messages)) > 2_900_000


def test_what_is_metered_is_computed_as_python_does() -> None:
    source = (
        "{{ 'a\tb'.expandtabs() }}|{{ 'a\tb'.expandtabs(4) }}|{{ 'a\tb'.expandtabs(tabsize=2) }}|{{ 'a'.center(3) }}|"
        "{{ 'a\nb' | indent('--') }}|{{ {'a': 1} == {'a': 1} }}|{{ [1, 2] | sum }}|{{ '%5.1f' % 2.25 }}|{{ 3 * 'ab' }}"
        "|{{ '{}{:>3}{x!r}'.format(1, 2, x='y') }}|{{ '{a.b[0]}'.format_map({'a': {'b': [5]}}) }}|{{ '%%(%(a)s' % {'a': 1} }}"
    )
    python = ["a\tb".expandtabs(), "a\tb".expandtabs(4), "a\tb".expandtabs(2), " a ", "a\n--b", "True", "3", "  2.2", "ababab"]
    python += ["{}{:>3}{x!r}".format(1, 2, x="y"), "5", "%(1"]
    assert ChatTemplate(source).render([]).split("|") == python


def test_one_rendering_does_not_use_up_anothers_budget() -> None:
    template = ChatTemplate("{{ 'a' * 1000000 }}")
    assert [len(template.render([])) for _ in range(5)] == [1000000] * 5
