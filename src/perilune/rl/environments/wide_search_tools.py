"""What agents do in the library: `search` finds pages, `open` shows one, `answer` hands in the table.

    library = library_of(CorpusConfig())      pages and index, made once in a process, the index at the first search
    tools(library)                            the three, for the swarm's runtime

Results are short, a few lines of ten words, and no list of results says the value of an attribute.
"""

from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from typing import TYPE_CHECKING, Any

from perilune.rl.environments.wide_search_corpus import Corpus, CorpusConfig
from perilune.rl.environments.wide_search_index import Index

if TYPE_CHECKING:  # a config that names this environment is read without the packages of the swarm
    from perilune.swarm.tools.tool import Tool, ToolContext

SEARCH, OPEN, ANSWER = "search", "open", "answer"
NOTHING = "Nothing found."
DONE = "Done."
RESULTS = 3


@dataclass(frozen=True, kw_only=True)
class Library:
    corpus: Corpus

    @cached_property
    def index(self) -> Index:
        return Index(self.corpus)

    def search(self, query: str) -> str:
        return _found(self, query)

    def open(self, page: str) -> str:
        """ToolError for an id that is none."""
        from perilune.swarm.tools.tool import ToolError

        found = self.corpus.by_id.get(page.strip())
        if found is None:
            raise ToolError(f"there is no page {page[:20]!r}: search shows the ids of pages")
        return self.corpus.text(found)


@lru_cache(maxsize=8192)
def _found(library: Library, query: str) -> str:
    """Samples of one task ask for the same things."""
    pages = library.index.search(query, RESULTS)
    return "\n".join(library.corpus.snippet(page) for page in pages) or NOTHING


@cache
def library_of(config: CorpusConfig) -> Library:
    return Library(corpus=Corpus(config))


@cache
def tools(library: Library) -> "tuple[Tool, ...]":
    """The same ones for all episodes: what is worked out about them once stays with them."""

    async def search(context: "ToolContext", arguments: dict[str, Any]) -> str:
        return library.search(arguments["query"])

    async def open_page(context: "ToolContext", arguments: dict[str, Any]) -> str:
        return library.open(arguments["page"])

    async def answer(context: "ToolContext", arguments: dict[str, Any]) -> str:
        return DONE

    row = {"type": "object", "properties": {"item": {"type": "string"}, "value": {"type": "string"}}}
    return (
        _tool(SEARCH, "Find pages by words.", {"query": {"type": "string"}}, search),
        _tool(OPEN, "Read a page by its id.", {"page": {"type": "string"}}, open_page),
        _tool(ANSWER, "Give the answer and end.", {"table": {"type": "array", "items": row}}, answer),
    )


def _tool(name: str, description: str, properties: dict[str, Any], call: Any) -> "Tool":
    from perilune.swarm.tools.tool import Tool, ToolError

    [(argument, schema)] = properties.items()
    wanted = str if schema["type"] == "string" else list

    def validate(raw: dict[str, Any]) -> dict[str, Any]:
        if set(raw) != {argument} or not isinstance(raw[argument], wanted):
            raise ToolError(f"{name} takes one argument, {argument}, a {schema['type']}")
        return raw

    parameters = {"type": "object", "properties": properties, "required": [argument]}
    return Tool(
        name=name, description=description, parameters=parameters, call=call, effects="none", validate=validate
    )  # fmt: skip
