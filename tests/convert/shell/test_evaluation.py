"""Scripts are evaluated as bash evaluates them: each script here is run by bash, too, and starts the same commands."""

import os
import subprocess
from random import Random

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from rlhfless_operator.convert.shell import HOME, ShellSyntaxError, evaluate

HOME_FOLDER = "/home/me"
STUB = """python3() { [ $# = 0 ] || printf '%s\\0' "$@"; printf '\\1'; }\n"""
"""In bash, the command whose words are compared writes them."""


def bash(script: str) -> list[tuple[str, ...]]:
    """The words of each `python3 ...` that bash starts."""
    environment = {"HOME": HOME_FOLDER, "PATH": os.environ["PATH"]}
    done = subprocess.run(["bash", "-c", STUB + script], capture_output=True, env=environment, check=False)
    return [tuple(words.split("\0")[:-1]) for words in done.stdout.decode().split("\1")[:-1]]


def ours(script: str) -> list[tuple[str, ...]]:
    commands, _, _ = evaluate(script)
    return [
        tuple(word.replace(HOME, HOME_FOLDER) for word in command.words[1:])
        for command in commands
        if command.words[0] == "python3"
    ]


SCRIPTS = r"""
python3 $((1024 * 2)) $(( 7/2 )) $((-7/2)) $((-7%3)) $((2**10)) $((1<<4|3)) $((5>3?10:20)) $((0x1f)) $((017)) $((16#ff))
---
N=4; M=$((N*2)); python3 $M $((M+N)) $((N++)) $N $((--N)) $((N+=5,N*2)) "$((N > 3 && N < 100))" $[1+2]
---
ROOT=${ROOT:-"${HOME}/lab"}; python3 "$ROOT/a" '$ROOT' "\$ROOT"
python3 ${X:-d e} "${X:-d e}" ${X:-"d e"} "${X:-"d e"}" ${X-} "${X-}"
---
A=(a "b c" d); A+=(e); python3 "${A[@]}" ${A[@]} "${A[*]}" ${#A[@]} ${A[1]} "${A[-1]}" ${A[@]:1:2} "x${A[@]}y"
---
E=(); python3 "${E[@]}" x "${E[*]}" ${E[@]}
---
X=/a/b/c.tar.gz
python3 ${X##*/} ${X%.*} ${X%%.*} ${X#*/} ${X/b/Z} ${X//\//-} ${X:1:3} ${X: -2} ${#X}
python3 ${X/#\/a/Q} ${X/%gz/zip} ${X^^}
---
D="a=1 b=2 \
  c=3"
python3 $D "$D"
---
f() { local q=$1; shift; python3 "$q" "$@" $#; }; q=9; f 1 2 3; python3 $q
---
for i in 1 2 3; do if [ $i -eq 2 ]; then continue; fi; python3 $i; done
---
for ((i=0;i<3;i++)); do python3 $i; done; while [ $i -lt 5 ]; do python3 $i; i=$((i+1)); done
---
case qwen2 in llama*) python3 l;; qwen*|x) python3 q;; *) python3 o;; esac
---
if [[ abc == a* && -n x ]]; then python3 y; else python3 n; fi; [[ a != b ]] && python3 z || python3 w
---
python3 {a,b}{1..3} x{1..2}y '{a,b}' "{a,b}" {a} a{b,c{d,e}}f {01..03} {3..1}
---
python3 a\ b 'it'"'"'s' $'a\tb' "a\"b" a#b # comment
python3 second
---
cat <<EOT > /dev/null
python3 not
EOT
python3 yes
---
declare -A M=([a]=1 [b]="2 3"); python3 ${M[a]} "${M[b]}"; M[c]=4; python3 ${M[c]}
---
set -- x y z; python3 $# "$@" $2 "${@:2}"; shift; python3 "$*"
---
X=5; (X=6; python3 $X); python3 $X; { X=7; }; python3 $X
---
CMD="python3 a b"; $CMD c; eval "python3 \"x y\" z"
---
python3 $(basename /a/b.sh .sh) $(dirname /a/b/c) `echo hi there` "$(echo a  b)"
---
X=a; X+=b; python3 $X; A[2]=q; export Y="$X c" Z=1; python3 "$Y" $Z
---
python3 a \
  b \
  # c \
  d
python3 e
---
python3 data.x=~/y ~/z "~/q" B=~/b
---
T=1; if ((T > 0)); then python3 big; elif false; then python3 no; fi
---
f() { return; python3 no; }; f; python3 yes; until true; do python3 no; done
---
python3 "['$HOME/a','$HOME/b']" "{a: 1}" +x='{a:1,b:2}' y=[1,2]
---
A=(
 a=1 # first
 b=2
 # whole
 "c=3 4"
)
python3 "${A[@]}"
---
[ -z "$NOPE" ] && python3 empty; [ "$NOPE" = "" ] && python3 eq; [ ! -z "a" ] && python3 nz
[ a = a -a b = b ] && python3 and
---
while [[ $# -gt 0 ]]; do case $1 in --a) A=$2; shift 2;; esac; done; python3 ${A:-dflt}
---
python3 a && python3 b || python3 c; false || python3 d; ! false && python3 e
---
for f in a.parquet b.parquet; do L="${L:+$L,}'/d/$f'"; done; python3 "[$L]"
---
A=(x y z); for i in "${!A[@]}"; do python3 $i ${A[$i]} ${A[i]}; done; unset A; python3 ${#A[@]} ${A:-none}
---
a=$(( 10 / 3 * 3 )) b=$((a<10?a:10)); python3 $a $b $((~5)) $((!0)) $((1||0&&0)) $((5&3^1)) $((-2**2))
---
N=7; [ 9 = "$((N += 1))" ] || A=b; test 1 -gt "$((N += 1))"; python3 $N $A
""".strip("\n").split("\n---\n")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script[:30])
def test_a_script_starts_what_bash_starts(script: str) -> None:
    assert ours(script) == bash(script)


# --- the grammar ---


class Grammar:
    """Scripts of the grammar that is read, drawn at random."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._one = random.choice

    def script(self) -> str:
        lines = [self._command(2) for _ in range(self._random.randint(1, 4))]
        return "\n".join(["A=a.b.c B='x y' C=/d/e.f N=7 L=(k 'l m')", *lines, 'python3 "$A" $B "$C" "${L[@]}"'])

    def _command(self, depth: int) -> str:
        if not depth or self._random.random() < 0.5:
            return self._simple()
        condition, body, other = self._condition(), self._command(depth - 1), self._command(depth - 1)
        return self._one(
            [
                f"if {condition}; then {body}; else {other}; fi",
                f"{condition} {self._one(['&&', '||'])} {body}",
                f"{self._started()} {self._one(['&&', '||'])} {body}",
                f"for A in {self._word()} {self._word()}; do {body}; done",
                f"case {self._quoted()} in {self._pattern()}) {body};; *) {other};; esac",
                f"( {body} )",
                f"{{ {body}; {other}; }}",
                f"f() {{ local B=9; {body}; }}; f 1 2",
                f"for ((N = 0; N < {self._random.randint(0, 3)}; N++)); do {body}; done",
            ]
        )

    def _simple(self) -> str:
        name = self._name()
        assigned = f"{name}{self._one(['=', '+='])}{self._word()}"
        items = f"L{self._one(['=', '+='])}({' '.join(self._word() for _ in range(self._random.randint(0, 3)))})"
        return self._one([assigned, self._started(), self._started(), items])

    def _started(self) -> str:
        return f"python3 {' '.join(self._word() for _ in range(self._random.randint(1, 3)))}"

    def _word(self) -> str:
        parts = [self._one([self._literal, self._expansion, self._quoted])() for _ in range(self._random.randint(1, 2))]
        return "".join(parts)

    def _literal(self) -> str:
        return self._one(
            ["a", "b.c", "/d/e", "x=1", "f-g_h", "1e-6", "'q r'", '"s  t"', "\\$u", "v\\ w", "{m,n}", "~/o", "{1..3}"]
        )

    def _quoted(self) -> str:
        inner = "".join(self._one([self._plain_expansion, lambda: "y z"])() for _ in range(self._random.randint(1, 2)))
        return f'"{inner}"'

    def _name(self) -> str:
        return self._one("ABC")

    def _pattern(self) -> str:
        return self._one(["*", "?", "*/", "*.", "a", "[a-f]", "b*", '"*"', "[!x]*"])

    def _plain_expansion(self) -> str:
        name, number = self._name(), self._random.randint(0, 9)
        return self._one(
            [
                f"${name}",
                f"${{{name}}}",
                f"${{#{name}}}",
                f"${{{name}{self._one(['%', '%%', '#', '##'])}{self._one(['*', '?', '*.', '*/', 'a', '[a-f]'])}}}",
                f"${{{name}{self._one(['/', '//'])}{self._one(['?', 'a', '[a-f]', '.'])}/z}}",
                f"${{{name}:{number}:2}}",
                f"${{{self._one([name, 'D'])}{self._one([':-', '-', ':+', '+'])}{self._one(['a', 'p  q', '$A'])}}}",
                f"$(({self._arithmetic(2)}))",
                "${#L[@]}",
                "${L[0]}",
                "${L[*]}",
            ]
        )

    def _expansion(self) -> str:
        return self._one([self._plain_expansion(), self._plain_expansion(), '"${L[@]}"', "${L[@]}", '"${L[@]:1}"'])

    def _arithmetic(self, depth: int) -> str:
        if not depth:
            return self._one([str(self._random.randint(0, 20)), "N", "$N", "${N}"])
        left, right = self._arithmetic(depth - 1), self._arithmetic(depth - 1)
        operators = ["+", "-", "*", "/", "%", "<<", ">", "<=", "==", "&&", "||", "&", "|", "^"]
        return self._one(
            [
                f"{left} {self._one(operators)} {right}",
                f"({left})",
                f"- {left}",
                f"{left} ? {right} : {left}",
                "(N += 1)",
            ]
        )

    def _condition(self) -> str:
        return self._one(
            [
                f"[ {self._quoted()} {self._one(['=', '!='])} {self._quoted()} ]",
                f"[[ {self._quoted()} {self._one(['==', '!='])} {self._pattern()} ]]",
                f"[ {self._one(['-z', '-n'])} {self._quoted()} ]",
                f"[[ -n {self._quoted()} {self._one(['&&', '||'])} N -gt {self._random.randint(0, 9)} ]]",
                f"(( N > {self._random.randint(0, 9)} ))",
            ]
        )


@settings(max_examples=50, phases=[Phase.generate, Phase.shrink])
@given(st.randoms(use_true_random=False))
def test_any_script_of_the_grammar_starts_what_bash_starts(random: Random) -> None:
    script = Grammar(random).script()
    try:
        found, unknowns, _ = evaluate(script)
    except ShellSyntaxError as error:
        assert "turns" in str(error), script
        return
    if not any(unknowns.reasons(word) for command in found for word in command.words):
        assert ours(script) == bash(script), script


# --- what only a run can tell ---


def reasons(script: str) -> list[str]:
    commands, unknowns, _ = evaluate(script)
    return [reason for command in commands for word in command.words for reason in unknowns.reasons(word)]


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("python3 $(date)", "$(date) is the output of a command"),
        ("python3 $KEY", "the script does not set KEY"),
        ("python3 $((GPUS * 2))", "the script does not set GPUS"),
        ("python3 $1", "the script does not set 1"),
        ("python3 $?", "$? is the end of a command"),
        ("N=$((1 / 0)); python3 $N", "1 / 0 divides by zero"),
        ("A=1; if grep x y; then A=2; fi; python3 $A", "it depends on the `if` in line 1"),
        ("A=1\nwhile read A; do :; done; python3 $A", "read reads A"),
        ("case $(uname) in L*) A=1;; *) A=2;; esac; python3 $A", "it depends on the `case` in line 1"),
        ("read A; python3 $A", "read reads A"),
        ("python3 <(ls)", "<(ls) is a command's output"),
        ('if [ $# -lt 1 ]; then exit 1; fi; python3 "$1"', "$1 and others are the script's arguments"),
    ],
)
def test_what_only_a_run_can_tell_is_unknown_and_says_why(script: str, reason: str) -> None:
    assert reasons(script) == [reason]


def test_ways_that_come_to_the_same_are_known() -> None:
    assert ours("if grep x y; then A=1; else A=1; fi; python3 $A") == [("1",)]
    assert ours("if grep x y; then exit 1; fi; python3 a") == [("a",)]


def test_texts_inside_of_a_script_are_followed() -> None:
    assert ours("srun --nodes 1 bash -c \"python3 a 'b c'\"") == [("a", "b c")]
    assert ours("bash <<EOT\npython3 a\nEOT") == [("a",)]
    assert evaluate("source env.sh; . other")[2] == ["source env.sh", ". other"]


@pytest.mark.parametrize(
    "script", ["python3 'a", 'A="b', "if true; then", "python3 $(a", "f() { f; }; f", "while true; do :; done"]
)
def test_what_is_no_script_or_does_not_end_is_refused_with_its_line(script: str) -> None:
    with pytest.raises(ShellSyntaxError, match="line 1"):
        evaluate(script)
