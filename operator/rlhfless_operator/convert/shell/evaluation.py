"""Follow a script as bash would, and collect the commands that it would start. No command runs.

Where only a run can tell which way a script goes, both are followed, and what differs afterwards is unknown. A command
that does something is taken to succeed. Variables that the script does not set are unknown; in conditions and for
defaults they are not set, and the script has no arguments.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from rlhfless_operator.convert.shell import builtins
from rlhfless_operator.convert.shell.conditions import holds, negated
from rlhfless_operator.convert.shell.nodes import (
    Arithmetic,
    Case,
    Chain,
    Condition,
    Counting,
    For,
    Function,
    Group,
    If,
    Node,
    Pipeline,
    Simple,
    While,
)
from rlhfless_operator.convert.shell.parsing import parse
from rlhfless_operator.convert.shell.patterns import regular_expression
from rlhfless_operator.convert.shell.scanning import ShellSyntaxError
from rlhfless_operator.convert.shell.values import State, Unknowns, is_known, joined
from rlhfless_operator.convert.shell.variables import Variables

_MOST_TURNS = 1000
"""Most turns of a loop; a script that repeats more is refused."""

_DOING = re.compile(
    r"(.*/)?(python[\d.]*|torchrun|accelerate|trl|ray|deepspeed|srun|bash|sh|pip|uv|mkdir|cp|mv|rm|ln|echo|printf|sleep|tee)"
)
"""Commands that are taken to succeed. Others, such as `grep`, may be there for a script to ask."""

_DEEPEST = 30
"""Most functions and scripts inside of each other."""


@dataclass(frozen=True)
class Command:
    """A command that a script would start, with its words."""

    line: int
    words: tuple[str, ...]


class _Left(Exception):  # noqa: N818 (it is no error)
    """The script, a function or a loop is left."""

    def __init__(self, by: str, levels: int = 1) -> None:
        super().__init__(by)
        self.by, self.levels = by, levels


def evaluate(text: str) -> tuple[list[Command], Unknowns, list[str]]:
    """Return the commands that a script would start, in order, and the reasons of the unknown parts of their words.

    The third is the commands that read other scripts, which are not followed.

    Raises:
        ShellSyntaxError: the script is not complete, has syntax that is not read, or repeats too often.
    """
    script = parse(text)
    shell = Shell(State())
    shell.follow(script)
    if shell.ended_early:
        # Most such scripts ask for arguments first.
        again = Shell(State(arguments=[]), arguments_unknown=True)
        again.follow(script)
        return again.commands, again.unknowns, again.sourced
    return shell.commands, shell.unknowns, shell.sourced


class Shell(Variables):
    """A script on its way.

    Args:
        state: its variables and arguments.
        arguments_unknown: whether it gets arguments that are unknown, instead of none.
    """

    def __init__(self, state: State, *, arguments_unknown: bool = False) -> None:
        super().__init__(state)
        self.commands: list[Command] = []
        self.ended_early = False
        self.functions: dict[str, Node] = {}
        self._depth = 0
        if arguments_unknown:
            state.arguments = [self.unknowns.add("$1 and others are the script's arguments")]

    def follow(self, script: Sequence[Node]) -> None:
        """Follow a script to its end."""
        try:
            self._all(script)
        except _Left as left:
            self.ended_early = left.by == "exit"

    def follow_text(self, text: str) -> None:
        """Follow a script inside of this one, in a shell of its own."""
        with self._own_shell(), self._deeper():
            self.follow(parse(text))

    @contextmanager
    def _deeper(self) -> Iterator[None]:
        self._depth += 1
        if self._depth > _DEEPEST:
            raise ShellSyntaxError(1, "functions call each other without end")
        yield
        self._depth -= 1

    @contextmanager
    def _own_shell(self) -> Iterator[None]:
        before = self.state
        self.state = before.copied()
        yield
        self.state = before

    # --- ways through the script ---

    def _all(self, nodes: Sequence[Node]) -> bool | None:
        status: bool | None = True
        for node in nodes:
            status = self._one(node)
        return status

    def _one(self, node: Node) -> bool | None:
        """Follow a command, and return whether it succeeds; None where only a run can tell."""
        match node:
            case Simple():
                return self._simple(node)
            case Arithmetic():
                return self.calculated(node.text)
            case Condition():
                return holds(node.words, self.words, double=True)
            case Pipeline():
                status = self._piped(node.commands)
                return negated(status) if node.negated else status
            case Chain():
                return self._chain(node)
            case Group(body, own_shell):
                return self._group(body) if own_shell else self._all(body)
            case If():
                return self._if(node.branches, node)
            case Function(name, body):
                self.functions[name] = body
                return True
            case Case():
                return self._case(node)
            case _:
                return self._loop(node)

    def _group(self, body: Sequence[Node]) -> bool | None:
        with self._own_shell():
            try:
                return self._all(body)
            except _Left:
                return None

    def _piped(self, commands: Sequence[Node]) -> bool | None:
        status: bool | None = True
        for command in commands:
            status = self._group([command]) if len(commands) > 1 else self._one(command)
        return status

    def _either(self, ways: Sequence[Callable[[], bool | None]], reason: str) -> bool | None:
        """Follow each of several ways from here on; afterwards, what differs is unknown."""
        before, after, left = self.state, [], None
        for way in ways:
            self.state = before.copied()
            try:
                way()
                after.append(self.state)
            except _Left as error:
                left = error
        if not after:
            assert left is not None
            raise left
        self.state = after[0]
        for other in after[1:]:
            self.state = joined(self.state, other, self.unknowns.add(reason))
        return None

    def _chain(self, chain: Chain) -> bool | None:
        status = self._one(chain.first)
        for operator, node in chain.rest:
            wanted = operator == "&&"
            if status is wanted:
                status = self._one(node)
            elif status is None:
                status = self._either([lambda: None, lambda node=node: self._one(node)], _reason(chain.first))  # type: ignore[misc]
        return status

    def _if(self, branches: Sequence[tuple[Sequence[Node], Sequence[Node]]], node: If) -> bool | None:
        if not branches:
            return self._all(node.otherwise)
        (condition, body), *others = branches
        status = self._all(condition)
        if status is None:
            reason = f"it depends on the `if` in line {node.line}"
            return self._either([lambda: self._all(body), lambda: self._if(others, node)], reason)
        return self._all(body) if status else self._if(others, node)

    def _case(self, node: Case) -> bool | None:
        self.words.unset_is_empty = True
        value = self.words.text(node.word)
        self.words.unset_is_empty = False
        if not is_known(value):
            ways = [lambda body=body: self._all(body) for _, body in node.items]
            return self._either([*ways, lambda: None], f"it depends on the `case` in line {node.line}")
        for patterns, body in node.items:
            for pattern in patterns:
                found = self.words.pattern(pattern)
                if is_known(found) and re.fullmatch(regular_expression(found), value, re.DOTALL):
                    return self._all(body)
        return True

    # --- loops ---

    def _loop(self, node: Node) -> bool | None:
        match node:
            case For(name, words, body):
                values = (
                    [field for word in words for field in self.words.fields(word)]
                    if words is not None
                    else list(self.state.arguments)
                )
                self._turns(node.line, iter(values), lambda value: self._set(name, value), body)
            case Counting(body=body):
                begin, condition, step = node.parts
                self.calculated(begin)
                test = (lambda: self.calculated(condition)) if condition.strip() else (lambda: True)
                self._while(node.line, test, body, lambda: self.calculated(step))
            case While(condition, body, reverse):
                self._while(
                    node.line,
                    lambda: negated(self._all(condition)) if reverse else self._all(condition),
                    body,
                    lambda: None,
                )
        return True

    def _set(self, name: str, value: str) -> None:
        self.state.values[name] = value

    def _turns(self, line: int, values: Iterator[str], begin: Callable[[str], None], body: Sequence[Node]) -> None:
        for number, value in enumerate(values):
            if number >= _MOST_TURNS:
                raise ShellSyntaxError(line, f"the loop has more than {_MOST_TURNS} turns")
            begin(value)
            if self._turn(body):
                return

    def _while(
        self, line: int, test: Callable[[], bool | None], body: Sequence[Node], step: Callable[[], object]
    ) -> None:
        for _ in range(_MOST_TURNS):
            status = test()
            if status is False:
                return
            if status is None:
                self._either([lambda: None, lambda: self._turn(body)], f"it depends on the loop in line {line}")
                return
            if self._turn(body):
                return
            step()
        raise ShellSyntaxError(line, f"the loop has more than {_MOST_TURNS} turns")

    def _turn(self, body: Sequence[Node]) -> bool:
        """Follow one turn of a loop, and return whether the loop ends with it."""
        try:
            self._all(body)
        except _Left as left:
            if left.by not in ("break", "continue"):
                raise
            if left.levels > 1:
                raise _Left(left.by, left.levels - 1) from None
            return left.by == "break"
        return False

    # --- commands ---

    def _simple(self, node: Simple) -> bool | None:
        words = list(node.words)
        assigned = []
        while words and (found := builtins.ASSIGNMENT.match(words[0])) is not None:
            assigned.append((found, words.pop(0)))
        name = self.words.fields(words[0]) if words else []
        if name in (["["], ["test"]):
            # The condition expands its words itself, once: an expansion may count.
            return holds(words[1 : -1 if name == ["["] else None], self.words, double=False)
        fields = name + [field for word in words[1:] for field in self.words.fields(word)]
        if not fields:
            for found, word in assigned:
                builtins.assign(self, found, word)
            # `X=$(command)` succeeds as its command does.
            return None if any("$(" in word or "`" in word for _, word in assigned) else True
        if fields[0] in self.functions:
            return self._call(fields)
        if fields[0] in ("exit", "return", "break", "continue"):
            self._leave(fields)
        if fields[0] == "eval":
            with self._deeper():
                self._all(parse(" ".join(fields[1:])))
            return None
        if (builtin := builtins.BUILTINS.get(fields[0])) is not None:
            return builtin(self, words, fields)
        self._start(node, fields)
        return True if _DOING.fullmatch(fields[0]) else None

    def _leave(self, fields: list[str]) -> None:
        levels = int(fields[1]) if fields[1:] and fields[1].isdigit() and fields[0] in ("break", "continue") else 1
        raise _Left(fields[0], levels)

    def _call(self, fields: list[str]) -> bool | None:
        name, *arguments = fields
        before = self.state.arguments
        self.locals.append({})
        with self._deeper():
            self.state.arguments = arguments
            try:
                return self._one(self.functions[name])
            except _Left as left:
                if left.by != "return":
                    raise
                return None
            finally:
                self.state.arguments = before
                for variable, value in self.locals.pop().items():
                    self.state.values.pop(variable, None)
                    if value is not None:
                        self.state.values[variable] = value

    def _start(self, node: Simple, fields: list[str]) -> None:
        self.commands.append(Command(node.line, tuple(fields)))
        for place, field in enumerate(fields):
            shell = fields[place - 1] if place else ""
            if re.fullmatch(r"-[a-z]*c", shell) and re.search(r"\b(ba|z|da)?sh$", fields[place - 2]):
                self.follow_text(field)
            elif field.startswith("--wrap="):
                self.follow_text(field.removeprefix("--wrap="))
        if re.search(r"(^|/)(ba|z)?sh$|^sbatch$|^ssh$|^srun$", fields[0]):
            for document in node.documents:
                self.follow_text(self.words.inner_text(document))


def _reason(node: Node) -> str:
    return f"it depends on a command in line {node.line}" if isinstance(node, Simple) else "it depends on a command"
