"""Serve's log of a process outlives what vLLM does when it is imported: see also `test_application`."""

import logging
import logging.config
import logging.handlers

from deployments.log_handlers import serve_log_kept


def test_records_reach_the_file_after_logging_was_configured_anew(tmp_path):
    file = logging.FileHandler(tmp_path / "replica.log")
    buffer = logging.handlers.MemoryHandler(1, target=file)
    logger = logging.getLogger("ray.serve")
    logger.addHandler(buffer)
    try:
        with serve_log_kept():
            logging.config.dictConfig({"version": 1, "disable_existing_loggers": False})
            assert buffer.target is None
        logger.warning("written afterwards")
        assert buffer.target is file
        assert "written afterwards" in (tmp_path / "replica.log").read_text()
    finally:
        logger.removeHandler(buffer)
        file.close()
