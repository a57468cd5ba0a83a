"""The arguments of `teacher-scoring`, and what becomes of them."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from scoring import MatrixRead, score_file, wire
from scoring.cli.check import check
from scoring.cli.connection import Connection
from scoring.cli.display import Display
from scoring.cli.ending import FINE, INTERRUPTED, SERVICE_FAILED, SOME_FAILED, TERMINATED, WRONG_INPUT, WrongInput
from scoring.cli.finished import FinishedPieces
from scoring.cli.inputs import open_rows
from scoring.cli.job import Totals, ask_pieces, source_of, totals_of
from scoring.cli.pieces import Piece, cut
from scoring.errors import InvalidRead, NoTokenizer, ScoringError, TeacherUnavailable
from scoring.http_client import AsyncHttpScoringClient, HttpScoringClient
from scoring.limits import TeacherLimits
from scoring.reads import EXTRAS
from scoring.row_reads import LabelReads, MatrixReads, one_token_each
from scoring.tokenizer import Tokenizer

_FIRST_ANSWER_S = 30.0  # a service that says nothing for so long is given up before anything is asked

_EXAMPLES = """\
examples:
  teacher-scoring check http://127.0.0.1:8000
  teacher-scoring score in.jsonl -o out.safetensors --top-k 8 --extras entropy
  teacher-scoring score in.parquet -o out.parquet --tokenizer /models/teacher --url https://host --token-file token
  teacher-scoring labels in.jsonl -o out.safetensors --labels Yes No --tokenizer /models/teacher
"""
_EXIT_CODES = """\
exit codes:
  0    everything was scored
  1    the output is there, and some of its reads failed: it holds their errors
  2    an argument, the file, or every row of its beginning is wrong
  3    the service cannot be reached, refuses, or its teacher has changed; what is finished is kept
  130  interrupted (143: terminated); what is finished is kept
"""
_RESUMING = """\
A run that was killed goes on where it was when it is started again: what is finished lies in OUTPUT.pieces until the
output is written, and no read of a finished piece is asked again; those that were under way are, at most --concurrency
pieces of about 16,384 tokens each. Rows or options that have changed meanwhile are noticed, said, and scored anew; so
is everything when the teacher's checkpoint has changed.
"""
_SCORE = """\
Log-probabilities of response tokens, and of candidates, for every row of a file.

A row of INPUT (.jsonl: an object a line; .parquet) has prompt_ids or prompt, and response_ids or response: ids, or text
for --tokenizer. Text is tokenised prompt and response apart, so that every response token is of the response's own
text; the prompt gets the tokenizer's special tokens. Optional columns: candidate_ids, a list of ids for each response
token, or one for all; rows, which response tokens are scored (positions, or true and false for each). Without
candidate_ids the response's own tokens are scored.
"""
_LABELS = """\
Log-probabilities of labels as the next token after a prompt, for every row of a file.

A row of INPUT (.jsonl: an object a line; .parquet) has prompt_ids or prompt, and label_ids or labels, unless all rows
share those of --label-ids or --labels. Text needs --tokenizer; a label is one token.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Returns its exit code; see `scoring.cli.ending`."""
    options = _parser().parse_args(arguments)
    try:
        return options.run(options)
    except WrongInput as error:
        code, why = WRONG_INPUT, error
    except ScoringError as error:
        code, why = SERVICE_FAILED, error
    except OSError as error:  # of a file
        code, why = WRONG_INPUT, error
    except KeyboardInterrupt:
        code, why = INTERRUPTED, "interrupted"
    except asyncio.CancelledError:
        code, why = TERMINATED, "terminated"
    print(f"teacher-scoring: {why}", file=sys.stderr)
    kept = Path(f"{getattr(options, 'output', None)}.pieces")
    if not isinstance(why, WrongInput) and kept.is_dir():
        print(f"what is finished is kept in {kept}: the same command goes on from there", file=sys.stderr)
    return code


def _parser() -> argparse.ArgumentParser:
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="teacher-scoring",
        description="Files of reads in, files of scores out, from a running service over HTTP.",
        epilog=f"{_EXAMPLES}\n{_EXIT_CODES}",
        formatter_class=plain,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    add = functools.partial(
        commands.add_parser, formatter_class=plain, epilog=f"{_RESUMING}\n{_EXAMPLES}\n{_EXIT_CODES}"
    )

    score = add("score", help="log-probabilities of response tokens and candidates", description=_SCORE)
    _add_file_arguments(score)
    score.add_argument("--top-k", type=int, default=0, metavar="N", help="the teacher's own N likeliest ids as well")
    score.add_argument("--extras", nargs="+", default=(), choices=EXTRAS, help="what else to say of each token: see "
                       "the extras of MatrixRead")  # fmt: skip
    score.set_defaults(run=_score)

    labels = add("labels", help="log-probabilities of labels as the next token", description=_LABELS)
    _add_file_arguments(labels)
    shared = labels.add_mutually_exclusive_group()
    shared.add_argument("--label-ids", nargs="+", type=int, metavar="ID", help="the labels of all rows")
    shared.add_argument("--labels", nargs="+", metavar="TEXT", help="the same as text")
    labels.set_defaults(run=_labels)

    checking = commands.add_parser(
        "check", help="health, teachers, limits and one timed read", epilog=_EXIT_CODES, formatter_class=plain,
        description="What a service says of itself, and how long one read takes.",
    )  # fmt: skip
    checking.add_argument("url", metavar="URL")
    _add_secrets(checking)
    checking.set_defaults(run=lambda options: check(Connection.of(options.url, options.token_file, options.ca_file)))
    return parser


def _add_file_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("input", type=Path, metavar="INPUT", help=".jsonl or .parquet")
    parser.add_argument("-o", "--output", type=Path, required=True, help=".safetensors or .parquet, not there yet")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="of the service (default: %(default)s)")
    _add_secrets(parser)
    parser.add_argument("--teacher", metavar="NAME", help="who scores (default: the service's default teacher)")
    parser.add_argument(
        "--tokenizer", type=Path, metavar="FOLDER", help="for text: the folder of the teacher's tokenizer"
    )
    parser.add_argument("--concurrency", type=_natural, default=8, metavar="N", help="pieces under way (default: 8)")
    parser.add_argument("--timeout", type=_seconds, default=600, metavar="SECONDS",
                        help="for one piece, its tries included (default: 600)")  # fmt: skip


def _add_secrets(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--token-file", type=Path, metavar="FILE", help="holds the token that the service asks for")
    parser.add_argument("--ca-file", type=Path, metavar="FILE", help="certificates (PEM) to trust over https")


def _natural(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"is {text!r}; allowed are whole numbers from 1 on")
    return int(text)


def _seconds(text: str) -> float:
    try:
        return wire.ReadOptions(float(text)).timeout_s
    except ValueError:  # InvalidRead is one
        raise argparse.ArgumentTypeError(
            f"is {text!r}; allowed are seconds above 0, up to {wire.MAX_TIMEOUT_S:g}"
        ) from None


def _score(options: argparse.Namespace) -> int:
    reads = MatrixReads(options.teacher, _tokenizer(options), options.top_k, tuple(options.extras))
    return _run("matrix", options, reads)


def _labels(options: argparse.Namespace) -> int:
    tokenizer, labels = _tokenizer(options), options.label_ids
    if options.labels is not None:
        try:
            labels = one_token_each(options.labels, tokenizer)
        except InvalidRead as error:
            raise WrongInput(f"--labels: {error}") from None
    return _run("label", options, LabelReads(options.teacher, tokenizer, labels))


def _tokenizer(options: argparse.Namespace) -> Tokenizer | None:
    if options.tokenizer is None:
        return None
    try:
        return Tokenizer(options.tokenizer)
    except NoTokenizer as error:
        raise WrongInput(f"--tokenizer {options.tokenizer}: {error.details.get('reason', error)}") from None


def _run(kind: wire.Kind, options: argparse.Namespace, reads: MatrixReads | LabelReads) -> int:
    rows = open_rows(options.input, reads.columns)
    write = _writer(options.output)
    connection = Connection.of(options.url, options.token_file, options.ca_file)
    teacher = _teacher(connection, options.teacher)
    if isinstance(reads, MatrixReads):
        _check_options(reads, teacher)
    source = source_of(teacher)
    about = {"input": str(options.input), "teacher": teacher["teacher"], **source}
    with FinishedPieces(options.output, source) as finished:
        with Display(rows.total) as display:
            for note in (*_other_teachers(finished), *_other_tokenizer(reads, teacher)):
                display.say(f"note: {note}")
            pieces = cut(kind, rows, reads)
            count = asyncio.run(_ask(kind, pieces, finished, source, connection, options, display))
        if not count:
            raise WrongInput(f"{options.input}: has no rows")
        totals = totals_of(finished, count)
        write(options.output, functools.partial(finished.paths, count), about)
        finished.discard()
    _summarise(totals, display, about)
    return SOME_FAILED if totals.failed else FINE


async def _ask(
    kind: wire.Kind,
    pieces: Iterator[Piece],
    finished: FinishedPieces,
    source: Mapping[str, Any],
    connection: Connection,
    options: argparse.Namespace,
    display: Display,
) -> int:
    async with connection.client(AsyncHttpScoringClient, timeout_s=options.timeout) as client:
        return await ask_pieces(kind, pieces, finished, source, client, options.concurrency, display)


def _other_teachers(finished: FinishedPieces) -> Iterator[str]:
    for other, count in finished.of_others().items():
        yield (
            f"the teacher has changed: {count} finished pieces are of {other}, and stay in {finished.folder.parent}; "
            f"everything is scored anew with {finished.folder.name}"
        )


def _other_tokenizer(reads: MatrixReads | LabelReads, teacher: Mapping[str, Any]) -> Iterator[str]:
    if reads.tokenizer is not None and teacher["tokenizer"] not in (None, reads.tokenizer.hash):
        yield (
            f"the tokenizer ({reads.tokenizer.hash}) is not the file of the teacher's ({teacher['tokenizer']}): unless "
            "both make the same ids of a text, the scores mean nothing"
        )


def _writer(output: Path) -> Callable[[Path, Callable[[], Iterable[Path]], Mapping[str, Any]], None]:
    """What writes a file of the kind its suffix names."""
    if output.exists():
        raise WrongInput(f"{output}: is there already; remove it, or name another")
    if output.suffix == ".safetensors":
        return score_file.join
    if output.suffix == ".parquet":
        from scoring.cli import parquet

        return parquet.write
    raise WrongInput(f"{output}: ends in {output.suffix or 'no suffix'!r}; output is .safetensors or .parquet")


def _teacher(connection: Connection, name: str | None) -> dict[str, Any]:
    """What the service says of the teacher that is asked for."""
    with connection.client(HttpScoringClient, timeout_s=_FIRST_ANSWER_S) as client:
        teachers = client.teachers()
    if name is None:
        name = next(name for name, teacher in teachers.items() if teacher["default"])
    if name not in teachers:
        raise WrongInput(f"--teacher {name}: is not served; the teachers are {', '.join(teachers)}")
    if not teachers[name]["replicas"]:
        raise TeacherUnavailable(f"no replica of teacher {name!r} answers")
    if teachers[name]["checkpoint"] is None:
        raise TeacherUnavailable(f"the service cannot read the adapter of teacher {name!r}")
    return teachers[name]


def _check_options(reads: MatrixReads, teacher: dict[str, Any]) -> None:
    limits = TeacherLimits(**{f.name: teacher[f.name] for f in dataclasses.fields(TeacherLimits)})
    try:
        limits.check_matrix(MatrixRead([0], [0], top_k=reads.top_k, extras=reads.extras))
    except InvalidRead as error:
        raise WrongInput(f"--{error.field.replace('_', '-')}: {error.message}") from None


def _summarise(totals: Totals, display: Display, about: Mapping[str, Any]) -> None:
    before, seconds = totals.reads - display.reads, display.seconds
    lines = {
        "reads": f"{totals.reads:,}" + (f", {before:,} of them in earlier runs" if before else ""),
        "failed": f"{totals.failed:,}",
        "tokens": f"{totals.tokens:,}",
        "seconds": f"{seconds:.1f}",
        "tokens/s": f"{display.tokens / seconds:,.0f}",
        "mean logprob": "none" if totals.mean is None else f"{totals.mean:.4f}",
        "checkpoint": f"{about['checkpoint']}, weight version {about['weight_version']}, of teacher {about['teacher']}",
    }
    for name, value in lines.items():
        print(f"{name:<14}{value}")
