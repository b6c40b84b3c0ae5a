"""Reports: what an audit found, for people (HTML, Markdown) and for machines (JUnit, SARIF)."""

from unmask.report.write import write_reports as write_reports
