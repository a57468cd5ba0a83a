"""What callers ask stays out of vLLM's log."""

import logging

DUMPS = "vllm.logging_utils.dump_input"
"""The logger to which vLLM writes, when a step of an engine fails, what it was computing: of prompts their lengths, but
of sampling parameters everything, and they hold the candidates, among them the response's own tokens."""


def keep_requests_out_of_the_log() -> None:
    """Drop that line; the others (configuration, statistics, the error itself) stay. May be called repeatedly."""
    logging.getLogger(DUMPS).addFilter(_holds_no_request)


def _holds_no_request(record: logging.LogRecord) -> bool:
    return "scheduler output" not in str(record.msg)
