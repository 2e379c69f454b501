#!/bin/sh
# Asks a running Baton over gRPC from a shell: examples/grpc.sh [HOST:PORT]
# With buf (npx @bufbuild/buf will do) or grpcurl; both learn the messages by reflection.
# A key goes along as a header: -H "authorization: Bearer $BATON_API_KEY".
set -eu
address=${1:-127.0.0.1:50051}
question='{"messages": [{"role": "user", "content": "What is the capital of France?"}],
           "options": {"sampling": {"temperature": 0}, "stop": {"max_tokens": 32}}}'

if command -v grpcurl > /dev/null; then
  grpcurl -plaintext "$address" list
  grpcurl -plaintext "$address" baton.v1.Inference/ListModels
  grpcurl -plaintext -d "$question" "$address" baton.v1.Inference/Chat
else
  # TLS: https:// in place of http:// --http2-prior-knowledge. Without reflection: --schema protos.
  ask="${BUF:-buf} curl --protocol grpc --http2-prior-knowledge"
  $ask --list-methods "http://$address"
  $ask "http://$address/baton.v1.Inference/ListModels"
  $ask --data "$question" "http://$address/baton.v1.Inference/Chat"
fi
