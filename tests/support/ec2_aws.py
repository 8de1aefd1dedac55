"""What the machines of tests/support/ec2_machines.py reach of AWS, and an index; it runs on their `aws`.

`ec2_aws.py serve FOLDER INDEX` serves moto, an index of packages, an index that never answers, and the URL
of the wait condition, whose answers are written into FOLDER. `ec2_aws.py call FUNCTION ARGUMENT...` does
something in AWS, as the user or the test would, and prints the result as JSON.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
from functools import partial
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from moto_process import REGION, Moto, make_group

from adaptdl_elastic.autoscaler.providers.ec2.ownership import tag

AWS_PORT, INDEX_PORT, SILENT_PORT, ANSWER_PORT = 5000, 8080, 8081, 8082
BUCKET = "lab"


class _Answer(BaseHTTPRequestHandler):
    """A wait condition: takes one JSON object without a content type, as a presigned URL of S3 does."""

    folder: Path

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        answer = json.loads(body)
        good = not self.headers["Content-Type"] and set(answer) == {"Status", "Reason", "UniqueId", "Data"}
        if good and len(body) <= 4096:
            # the file is whole when it has its name
            (self.folder / "begun").write_bytes(body)
            (self.folder / "begun").rename(self.folder / "answer.json")
        self.send_response(200 if good else 403)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


def serve(folder: Path, index: Path) -> None:
    """Serve until the process is killed; print a line when everything listens."""
    from moto.server import ThreadedMotoServer

    _Answer.folder = folder
    ThreadedMotoServer(ip_address="0.0.0.0", port=AWS_PORT, verbose=False).start()
    servers = [
        ThreadingHTTPServer(("", INDEX_PORT), partial(SimpleHTTPRequestHandler, directory=str(index))),
        ThreadingHTTPServer(("", ANSWER_PORT), _Answer),
    ]
    silent = socket.create_server(("", SILENT_PORT), backlog=16)
    threads = [threading.Thread(target=server.serve_forever) for server in servers]
    for thread in threads:
        thread.start()
    print("ready", silent.getsockname(), flush=True)
    for thread in threads:
        thread.join()


MOTO = Moto(f"http://127.0.0.1:{AWS_PORT}")


def make_stack(stack: str, kinds: str, most_nodes: str, tags: str, *files: str) -> str:
    """Make what `adaptdl cloud up` and CloudFormation make; return the queue's address.

    Args:
        stack: Its name.
        kinds: Types of the nodes, with a comma.
        most_nodes: The most nodes of a group.
        tags: Of each group, as JSON.
        files: KEY=PATH of what is uploaded.
    """
    s3 = MOTO.client("s3")
    s3.create_bucket(Bucket=BUCKET, CreateBucketConfiguration={"LocationConstraint": REGION})
    for file in files:
        key, _, path = file.partition("=")
        s3.upload_file(path, BUCKET, key)
    types = tuple(kinds.split(","))
    # moto forgets the launch template of a mixed group when the group is updated
    for name, spot in ((f"{stack}-spot", True), (f"{stack}-on-demand", False)):
        given = [tag(name, key, value) for key, value in json.loads(tags).items()]
        make_group(MOTO, name, high=int(most_nodes), types=types[:1], spot=spot, Tags=given)
    url: str = MOTO.client("sqs").create_queue(QueueName="notices")["QueueUrl"]
    return url


def instances() -> list[dict[str, Any]]:
    """Return the instances of all groups, in the order in which they were launched."""
    found = MOTO.client("autoscaling").describe_auto_scaling_instances()["AutoScalingInstances"]
    return [{"id": one["InstanceId"], "group": one["AutoScalingGroupName"]} for one in found]


def objects() -> list[str]:
    """Return the keys of what machines have written into the bucket."""
    found = MOTO.client("s3").list_objects_v2(Bucket=BUCKET)
    return [one["Key"] for one in found.get("Contents", []) if not one["Key"].endswith(".tar.gz")]


def text(key: str) -> str:
    """Return the content of an object in the bucket."""
    content: bytes = MOTO.client("s3").get_object(Bucket=BUCKET, Key=key)["Body"].read()
    return content.decode()


def parameters() -> dict[str, str]:
    """Return the parameters of SSM and their values."""
    ssm = MOTO.client("ssm")
    names = [one["Name"] for one in ssm.describe_parameters()["Parameters"]]
    return {
        name: ssm.get_parameter(Name=name, WithDecryption=True)["Parameter"]["Value"]
        for name in sorted(names)
    }


FUNCTIONS = {one.__name__: one for one in (make_stack, instances, objects, text, parameters)}

if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(Path(sys.argv[2]), Path(sys.argv[3]))
    else:
        print(json.dumps(FUNCTIONS[sys.argv[2]](*sys.argv[3:])))
