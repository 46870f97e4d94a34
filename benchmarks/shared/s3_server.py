"""An S3 server on this machine (moto), for benchmarks that need an object store."""

import logging
import os
import uuid


def start_s3_server() -> tuple[str, tuple[str, int]]:
    """Start it in this process, and point the standard AWS variables to it.

    Returns:
        The URI of an empty bucket, and the server's host and port.
    """
    import boto3
    from moto.server import ThreadedMotoServer

    os.environ |= {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # It tells of each request.
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    os.environ["AWS_ENDPOINT_URL"] = f"http://{host}:{port}"
    bucket = f"bucket-{uuid.uuid4().hex[:12]}"
    boto3.client("s3").create_bucket(Bucket=bucket)
    return f"s3://{bucket}", (host, port)
