"""S3 on this machine, for tests of buckets."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import boto3
from moto.server import ThreadedMotoServer

BUCKET = "krul-kv"


@contextmanager
def local_s3() -> Iterator[dict[str, str]]:
    """Serve an empty bucket; yields the environment in which clients find it."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        keys = {"AWS_ACCESS_KEY_ID": "of-tests", "AWS_SECRET_ACCESS_KEY": "of-tests"}
        env = {**keys, "AWS_REGION": "us-east-1", "AWS_ENDPOINT": f"http://{host}:{port}"}
        client = boto3.client(
            "s3",
            endpoint_url=env["AWS_ENDPOINT"],
            region_name=env["AWS_REGION"],
            aws_access_key_id=keys["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=keys["AWS_SECRET_ACCESS_KEY"],
        )
        client.create_bucket(Bucket=BUCKET)
        yield env
    finally:
        server.stop()
