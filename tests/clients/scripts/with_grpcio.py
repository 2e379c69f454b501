"""What a program does with grpcio and the protos, and nothing of Baton's; prints JSON.

argv: the folder of modules that grpcio-tools made.
"""

import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor

import grpc

sys.path.insert(0, sys.argv[1])
from baton.v1 import inference_pb2 as pb
from baton.v1 import inference_pb2_grpc, tokenizer_pb2, types_pb2

RETRY = {
    "methodConfig": [
        {
            "name": [{"service": "baton.v1.Inference"}],
            "retryPolicy": {
                "maxAttempts": 5,
                "initialBackoff": "4s",
                "maxBackoff": "10s",
                "backoffMultiplier": 1.5,
                "retryableStatusCodes": ["RESOURCE_EXHAUSTED"],
            },
        }
    ]
}
channel = grpc.insecure_channel(
    os.environ["GRPC"], options=[("grpc.service_config", json.dumps(RETRY))]
)
stub = inference_pb2_grpc.InferenceStub(channel)
options = pb.GenerationOptions(
    sampling=types_pb2.SamplingParams(temperature=0), stop=types_pb2.StopParams(max_tokens=12)
)


def key(name):
    return {"metadata": (("authorization", "Bearer " + os.environ[name]),), "timeout": 60}


def text(call):
    return "".join(one.event.delta.text for one in call)


def chat(name, **more):
    message = tokenizer_pb2.ChatMessage(role="user", content="Who are you?")
    return text(stub.Chat(pb.ChatRequest(messages=[message], options=options, **more), **key(name)))


def failure(**wrong):
    try:
        chat("OPENAI_API_KEY", **wrong)
    except grpc.RpcError as error:
        return [error.code().name]


def limited_chat(_):
    return chat("TIGHT_KEY")


# At once, so that one of them is refused however slow this machine is.
with ThreadPoolExecutor(3) as pool:
    retried = [*pool.map(limited_chat, range(3)), limited_chat(3)]
prompt = pb.GenerateRequest(text="The capital of France", options=options)
print(
    json.dumps(
        {
            "chat": chat("OPENAI_API_KEY"),
            "completion": text(stub.Generate(prompt, **key("OPENAI_API_KEY"))),
            "errors": [failure(model="other")],
            "retried": retried,
        }
    )
)
