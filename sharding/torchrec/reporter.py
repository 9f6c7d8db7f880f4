"""The report of a plan for TorchRec's PlanReporter, which torchrec has from 1.9 on."""

import json
import logging
import re
import warnings
from pathlib import Path
from typing import Any

from torchrec.distributed.planner.types import PlannerSessionContext, Stats

from ..report.plan_report import PlanReport

logger = logging.getLogger(__name__)


class PlanReportSink(Stats):  # type: ignore[misc]
    """Receives the report of one plan; see BLSPlanReporter.

    Args:
        sku: SKU that the plan is for.
        folder: folder for the files; None writes none.
    """

    def __init__(self, sku: str, folder: Path | None) -> None:
        self._sku = sku
        self._folder = folder
        self._written: Path | None = None

    def write(self, report: PlanReport) -> None:
        """Writes the report. Planners of BLSPlannerProvider call it. If files can't be written, it
        warns."""
        text = report.as_text()
        logger.info("%s\n%s", self._sku, text)
        if self._folder is None:
            return
        # A SKU may be any text, but the name of a file must not lead to another folder.
        name = re.sub(r"[^\w-]", "_", self._sku)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            (self._folder / f"{name}.txt").write_text(text + "\n", "utf-8")
            (self._folder / f"{name}.html").write_text(report.as_html(), "utf-8")
            path = self._folder / f"{name}.json"
            path.write_text(json.dumps(report.as_json(), indent=2) + "\n", "utf-8")
        except OSError as error:
            warnings.warn(
                f"the report of the plan for {self._sku} is not in {self._folder}: {error}. The "
                "plan is used all the same",
                stacklevel=3,
            )
        else:
            self._written = path

    def log(self, *arguments: Any, **options: Any) -> None:
        """Warns. TorchRec's own planners call it, but it has no report of their plans."""
        warnings.warn(
            f"BLSPlanReporter has no report of the plan for {self._sku}: it was made by a planner "
            "of TorchRec. Give the executor a BLSPlannerProvider, or the orchestrator TorchRec's "
            "DefaultPlanReporter",
            stacklevel=3,
        )

    def get_most_recent_sharding_plan_dump_location(self) -> str | None:
        """Returns the file's place. TorchRec's orchestrator puts it into the result of the plan."""
        return None if self._written is None else str(self._written)


class BLSPlanReporter:
    """A PlanReporter of torchrec 1.9: the report of each plan of a BLSPlannerProvider.

    The text of the report goes to the log (logger torchrec_bls.sharding.torchrec.reporter, level
    INFO). With a folder it also writes SKU.txt, SKU.html and SKU.json there. TorchRec's result of
    the plan then names SKU.json.

    Args:
        folder: folder for the files, made if it is missing; None writes none.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        self._folder = None if folder is None else Path(folder)

    def build_stats(self, ctx: PlannerSessionContext, sku: str) -> list[Stats]:
        """Returns the sink for a plan. TorchRec's orchestrator calls it before each plan."""
        return [PlanReportSink(sku, self._folder)]
