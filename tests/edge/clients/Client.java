// Asks the HTTP edge as Java's own client does by default: HTTP/1.1 with `Upgrade: h2c` at first.
// Run: java Client.java ADDRESS NUMBER     prints what it got as lines of "STATUS VERSION WAY BODY".

import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;
import java.time.Duration;
import java.util.stream.Collectors;

public class Client {
    private static final String BODY = "{\"prompt\": \"text %d\", \"max_tokens\": 200, \"stream\": %s}";

    private static HttpRequest ask(String address, int number, boolean stream) {
        return HttpRequest.newBuilder(URI.create("http://" + address + "/v1/completions"))
                .timeout(Duration.ofSeconds(30))
                .header("Content-Type", "application/json")
                .POST(HttpRequest.BodyPublishers.ofString(String.format(BODY, number, stream)))
                .build();
    }

    private static void tell(HttpResponse<?> response, String way, String body) {
        System.out.println(response.statusCode() + " " + response.version() + " " + way + " " + body.replace("\n", " "));
    }

    public static void main(String[] arguments) throws Exception {
        String address = arguments[0];
        int number = Integer.parseInt(arguments[1]);
        HttpClient kept = HttpClient.newHttpClient();
        for (int i = 0; i < number; i++) {
            // A new client asks over a new connection, and so for an upgrade each time.
            for (HttpClient client : new HttpClient[] {HttpClient.newHttpClient(), kept}) {
                HttpRequest whole = ask(address, i, false);
                HttpResponse<String> answer = client.send(whole, HttpResponse.BodyHandlers.ofString());
                tell(answer, "whole", answer.body());
                HttpRequest streamed = ask(address, i, true);
                var lines = client.send(streamed, HttpResponse.BodyHandlers.ofLines());
                tell(lines, "streamed", lines.body().collect(Collectors.joining("\n")));
            }
        }
    }
}
