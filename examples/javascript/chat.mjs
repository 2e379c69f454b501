// Asks a running Baton over gRPC: npm install, then node chat.mjs [HOST:PORT]
import { fileURLToPath } from "node:url";
import grpc from "@grpc/grpc-js";
import loader from "@grpc/proto-loader";

const address = process.argv[2] ?? "127.0.0.1:50051";
const protos = fileURLToPath(new URL("../../protos", import.meta.url));
const definition = loader.loadSync("baton/v1/inference.proto", {
  includeDirs: [protos],
  longs: Number,
  enums: String,
  defaults: true,
  oneofs: true,
});
const { Inference } = grpc.loadPackageDefinition(definition).baton.v1;
const client = new Inference(address, grpc.credentials.createInsecure());

const metadata = new grpc.Metadata();
if (process.env.BATON_API_KEY) {
  metadata.set("authorization", `Bearer ${process.env.BATON_API_KEY}`);
}

const call = client.chat(
  {
    messages: [{ role: "user", content: "What is the capital of France?" }],
    options: { sampling: { temperature: 0 }, stop: { maxTokens: 32 } },
  },
  metadata,
);
call.on("data", ({ event }) => {
  if (event.delta) process.stdout.write(event.delta.text);
  if (event.finished) {
    const { completionTokens, stages } = event.finished;
    console.log(`\n${completionTokens} tokens`);
    if (stages) console.log(`first text after ${stages.firstTokenUs / 1000} ms`);
  }
});
call.on("error", (error) => {
  console.error(error.details);
  process.exitCode = 1;
  client.close();
});
call.on("end", () => client.close());
