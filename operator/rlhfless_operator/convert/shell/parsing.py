"""Parse a shell script."""

import re

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
from rlhfless_operator.convert.shell.scanning import (
    ShellSyntaxError,
    end_of_brackets,
    end_of_word,
    line_of,
)

_OPERATOR = re.compile(r"\n|;;&|;;|;&|;|&&|&>>|&>|&|\|\||\|&|\||<<<|<<-|<<|<&|<>|>>|>&|>\||<|>|\(|\)")
_REDIRECTIONS = ("<", ">", ">>", ">|", "<&", ">&", "<>", "&>", "&>>", "<<<", "<<", "<<-")
_RESERVED = ("then", "elif", "else", "fi", "do", "done", "esac", "}")


def parse(text: str) -> tuple[Node, ...]:
    """Parse a script.

    Raises:
        ShellSyntaxError: it is not complete, or has syntax that is not read.
    """
    parser = _Parser(text.replace("\r\n", "\n").replace("\r", "\n"))
    nodes = parser.program(())
    if parser.peek()[0] != "end":
        raise ShellSyntaxError(parser.line(), f"{parser.peek()[1]} was not expected")
    return nodes


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._next: tuple[str, str] | None = None
        self._documents: list[tuple[str, bool, list[str]]] = []
        """Here-documents that begin in the next line: their mark, whether tabs are removed, and their command's."""

    def line(self) -> int:
        return line_of(self._text, self._at)

    # --- tokens ---

    def peek(self) -> tuple[str, str]:
        """Return the kind and the text of the next token: a word, a number of a redirection, an operator or the end."""
        if self._next is None:
            self._skip_space()
            self._next = self._token()
        return self._next

    def take(self) -> str:
        _kind, token = self.peek()
        self._next = None
        self._at += len(token)
        if token == "\n":
            self._read_documents()
        return token

    def _skip_space(self) -> None:
        while self._at < len(self._text):
            if self._text.startswith("\\\n", self._at):
                self._at += 2
            elif self._text[self._at] in " \t":
                self._at += 1
            elif self._text[self._at] == "#":
                self._at = (self._text + "\n").index("\n", self._at)
            else:
                return

    def _token(self) -> tuple[str, str]:
        if self._at >= len(self._text):
            return "end", ""
        if not self._text.startswith(("<(", ">("), self._at):
            if (operator := _OPERATOR.match(self._text, self._at)) is not None:
                return "operator", operator[0]
            if (number := re.compile(r"\d+(?=[<>])").match(self._text, self._at)) is not None:
                return "number", number[0]
        return "word", self._text[self._at : end_of_word(self._text, self._at)]

    def _read_documents(self) -> None:
        for mark, tabs, place in self._documents:
            lines = []
            while self._at < len(self._text):
                end = (self._text + "\n").index("\n", self._at)
                line = self._text[self._at : end]
                self._at = min(end + 1, len(self._text))
                if (line.lstrip("\t") if tabs else line) == mark:
                    break
                lines.append(line)
            place.append("\n".join(lines) + "\n")
        self._documents = []

    # --- commands ---

    def program(self, ends: tuple[str, ...]) -> tuple[Node, ...]:
        """Parse commands until one of `ends`, which stays, or the text's end."""
        nodes: list[Node] = []
        while True:
            while self.peek()[1] in ("\n", ";", "&") and self.peek()[0] == "operator":
                self.take()
            kind, token = self.peek()
            if kind == "end" or token in ends or (kind == "operator" and token == ")"):
                return tuple(nodes)
            if kind == "word" and token in _RESERVED:
                raise ShellSyntaxError(self.line(), f"{token} was not expected")
            nodes.append(self._chain())

    def _body(self, *ends: str) -> tuple[Node, ...]:
        nodes = self.program(ends)
        if self.peek()[1] not in ends:
            raise ShellSyntaxError(self.line(), f"{' or '.join(ends)} is missing")
        return nodes

    def _chain(self) -> Node:
        first, rest = self._pipeline(), []
        while self.peek() in (("operator", "&&"), ("operator", "||")):
            operator = self.take()
            self._skip_lines()
            rest.append((operator, self._pipeline()))
        return Chain(first, tuple(rest)) if rest else first

    def _skip_lines(self) -> None:
        while self.peek() == ("operator", "\n"):
            self.take()

    def _pipeline(self) -> Node:
        negated = False
        while self.peek() == ("word", "!"):
            self.take()
            negated = not negated
        commands = [self._command()]
        while self.peek() in (("operator", "|"), ("operator", "|&")):
            self.take()
            self._skip_lines()
            commands.append(self._command())
        return Pipeline(tuple(commands), negated) if negated or len(commands) > 1 else commands[0]

    def _command(self) -> Node:
        kind, token = self.peek()
        line = self.line()
        if kind == "operator" and token == "(":
            return self._redirected(self._arithmetic(line) or self._parentheses())
        if kind == "operator" and token not in _REDIRECTIONS:
            raise ShellSyntaxError(line, f"{token!r} was not expected")
        compound = {
            "if": self._if, "while": self._while, "until": self._while, "for": self._for, "select": self._for,
            "case": self._case, "{": self._braces, "function": self._function, "[[": self._condition,
        }  # fmt: skip
        if kind == "word" and token in compound:
            return self._redirected(compound[token](line))
        return self._simple(line)

    def _redirected(self, node: Node) -> Node:
        while self._redirection([]):
            pass
        return node

    def _redirection(self, documents: list[str]) -> bool:
        """Skip a redirection, if the next token begins one."""
        kind, token = self.peek()
        if kind == "number":
            self.take()
            kind, token = self.peek()
        if kind != "operator" or token not in _REDIRECTIONS:
            return False
        self.take()
        target = self.take()
        if token in ("<<", "<<-"):
            self._documents.append((re.sub(r"[\\'\"]", "", target), token == "<<-", documents))
        return True

    def _simple(self, line: int) -> Node:
        words: list[str] = []
        documents: list[str] = []
        while True:
            if self._redirection(documents):
                continue
            kind, _token = self.peek()
            if kind != "word":
                break
            words.append(self.take())
            if len(words) == 1 and self.peek() == ("operator", "(") and self._text.startswith("(", self._at):
                return self._function_called(words[0])
        return Simple(tuple(words), line, documents)

    def _function_called(self, name: str) -> Node:
        self.take()
        if self.peek()[1] != ")":
            raise ShellSyntaxError(self.line(), f"{name} is followed by ( without )")
        self.take()
        self._skip_lines()
        return Function(name, self._command())

    def _function(self, line: int) -> Node:
        self.take()
        name = self.take()
        if self.peek() == ("operator", "("):
            return self._function_called(name)
        self._skip_lines()
        return Function(name, self._command())

    def _arithmetic(self, line: int) -> Node | None:
        if not self._text.startswith("((", self._at):
            return None
        end = end_of_brackets(self._text, self._at)
        inner = self._text[self._at + 1 : end - 1]
        if not (inner.startswith("(") and inner.endswith(")")) or end_of_brackets(inner, 0) != len(inner):
            return None
        self._next, self._at = None, end
        return Arithmetic(inner[1:-1], line)

    def _parentheses(self) -> Node:
        self.take()
        body = self._body(")")
        self.take()
        return Group(body, own_shell=True)

    def _braces(self, line: int) -> Node:
        self.take()
        body = self._body("}")
        self.take()
        return Group(body, own_shell=False)

    def _if(self, line: int) -> Node:
        branches = []
        self.take()
        while True:
            condition = self._body("then")
            self.take()
            branches.append((condition, self._body("elif", "else", "fi")))
            word = self.take()
            if word == "elif":
                continue
            otherwise = self._body("fi") if word == "else" else ()
            if word == "else":
                self.take()
            return If(tuple(branches), otherwise, line)

    def _while(self, line: int) -> Node:
        word = self.take()
        condition = self._body("do")
        return While(condition, self._loop_body(), word == "until", line)

    def _loop_body(self) -> tuple[Node, ...]:
        while self.peek()[1] in ("\n", ";"):
            self.take()
        if self.peek()[1] != "do":
            raise ShellSyntaxError(self.line(), "do is missing")
        self.take()
        body = self._body("done")
        self.take()
        return body

    def _for(self, line: int) -> Node:
        self.take()
        self.peek()
        if isinstance(counted := self._arithmetic(line), Arithmetic):
            begin, condition, step = (*counted.text.split(";"), "", "")[:3]
            return Counting((begin, condition, step), self._loop_body(), line)
        name, words = self.take(), None
        self._skip_lines()
        if self.peek() == ("word", "in"):
            self.take()
            found = []
            while self.peek()[0] in ("word", "number"):
                found.append(self.take())
            words = tuple(found)
        return For(name, words, self._loop_body(), line)

    def _case(self, line: int) -> Node:
        self.take()
        word = self.take()
        self._skip_lines()
        if self.take() != "in":
            raise ShellSyntaxError(self.line(), "in is missing")
        items: list[tuple[tuple[str, ...], tuple[Node, ...]]] = []
        while True:
            self._skip_lines()
            if self.peek()[1] == "esac":
                self.take()
                return Case(word, tuple(items), line)
            if self.peek()[1] == "(":
                self.take()
            patterns = [self.take()]
            while self.peek()[1] == "|":
                self.take()
                patterns.append(self.take())
            if self.take() != ")":
                raise ShellSyntaxError(self.line(), ") is missing in case")
            items.append((tuple(patterns), self._body(";;", ";&", ";;&", "esac")))
            if self.peek()[1] != "esac":
                self.take()

    def _condition(self, line: int) -> Node:
        self.take()
        words = []
        while self.peek()[1] != "]]":
            if self.peek()[0] == "end":
                raise ShellSyntaxError(line, "]] is missing")
            words.append(self.take())
        self.take()
        return Condition(tuple(word for word in words if word != "\n"), line)
