"""The command `adaptdl web`."""

from __future__ import annotations

import errno
import signal
import threading
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import click

from adaptdl_elastic.autoscaler.cli import CommandError, Where, echo, standalone_job_option, store_options
from adaptdl_elastic.autoscaler.commands.cluster_setup import client_of
from adaptdl_elastic.autoscaler.commands.copy import tensorboard_url
from adaptdl_elastic.autoscaler.commands.job_requests import RequestError
from adaptdl_elastic.autoscaler.diagnostics import explanation
from adaptdl_elastic.autoscaler.diagnostics.rows import is_lost, why_lost
from adaptdl_elastic.autoscaler.policy import allocate
from adaptdl_elastic.autoscaler.web.actions import Actions
from adaptdl_elastic.autoscaler.web.feed import Feed
from adaptdl_elastic.autoscaler.web.http_server import Served, WebServer
from adaptdl_elastic.rendezvous.schema.keys import Keys

DEFAULT_PORT = 9310
"""Port of the page, unless it is in use."""


@click.command()
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    help=f"Port on 127.0.0.1; 0: any free one. [default: {DEFAULT_PORT}, or any if that is in use]",
)
@standalone_job_option
@store_options
def web(where: Where, standalone_job: str | None, port: int | None) -> None:
    """Show the cluster live in a browser, until Ctrl-C.

    The page is served on loopback only. From another machine: ssh -L 9310:127.0.0.1:9310 HOST.
    """
    place = where.locate(standalone_job)
    where.open(place).close()  # an error is told here, not on the page
    keys = Keys(place.cluster)
    context = place.context
    feed = Feed(lambda: where.open(place), keys, context.cluster_id if context is not None else "")
    client = client_of(context) if context is not None else None
    actions = Actions(lambda: where.open(place), keys, context, client)
    curves = partial(tensorboard_url, context) if context is not None else str
    with ExitStack() as stack:
        served = Served(place.job or place.cluster, feed, actions, explainer(feed), curves)
        server = listen(port, served)
        stack.callback(server.server_close)
        feed.start()
        stack.callback(feed.close)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: threading.Thread(target=server.shutdown).start())
        echo(server.url)
        echo("adaptdl: this address lets a browser in; Ctrl-C ends the page", err=True)
        server.serve_forever()


def listen(port: int | None, served: Served) -> WebServer:
    """Return a server on this port; without one on the default port or, if that is in use, any.

    Raises:
        CommandError: the port cannot be used.
    """
    try:
        return WebServer(DEFAULT_PORT if port is None else port, served)
    except OSError as error:
        if port is None and error.errno == errno.EADDRINUSE:
            return WebServer(0, served)
        raise CommandError(f"--port {port}: {error.strerror}; choose another, or 0 for any") from error


def explainer(feed: Feed) -> Callable[[str], list[str]]:
    """Return a function that explains a job's size by the newest view of a feed."""

    def explain(name: str) -> list[str]:
        view = feed.view
        job = view.jobs.get(name)
        if job is None or job.spec is None:
            raise RequestError(f"{name} has not begun: its row says why")
        if is_lost(view, job):
            raise RequestError(f"{name} has nothing: {why_lost(job)}")
        found = explanation.explain(view, job, allocate, explanation.leaders_settings(view))
        return [line.strip() for line in explanation.lines(found)]

    return explain
