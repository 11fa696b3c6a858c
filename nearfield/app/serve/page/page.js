"use strict";

const at = (id) => document.getElementById(id);
const messages = [];
let running = null;

function element(kind, className, text) {
  const made = document.createElement(kind);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

function showError(text) {
  at("error").textContent = text;
  at("error").hidden = !text;
}

async function reason(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the server answered with status ${response.status}`;
  }
}

function add(role, text) {
  at("empty").hidden = true;
  const item = element("li", role);
  item.append(element("span", "who", role === "user" ? "You" : "Answer"), element("p", "text", text));
  at("chat").append(item);
  item.scrollIntoView({ block: "end" });
  return item;
}

function percent(share, digits) {
  return `${(100 * share).toFixed(digits)}%`;
}

function showDetails(item, details, finish) {
  for (const found of details.citations) {
    const quote = element("blockquote");
    const where = `${found.document}, line ${found.line} (${percent(found.position, 0)}), ${percent(found.share, 0)} of looks`;
    quote.append(element("p", "", found.excerpt), element("cite", "", where));
    item.append(quote);
  }
  const facts = [];
  if (at("documents").dataset.some && !details.citations.length) facts.push("no passage of the documents stood out");
  if (details.out_of_time) facts.push("stopped: the time for an answer was over");
  else if (finish === "length") facts.push("stopped at the limit of tokens");
  facts.push(`first token after ${details.seconds_to_first_token.toFixed(1)} s`);
  if (details.tokens_per_second) facts.push(`${details.tokens_per_second.toFixed(1)} tokens per second`);
  const error = details.attention_error;
  if (error && error.mean === null) facts.push("attention gave no numbers");
  else if (error) facts.push(`error of attention ${percent(error.mean, 2)} on average, ${percent(error.worst, 2)} in the worst head`);
  item.append(element("p", "facts", facts.join("; ")));
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    rest += value;
    const parts = rest.split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

async function answer(item) {
  const response = await fetch("/v1/chat/completions", {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify({ messages, stream: true }),
    signal: running.signal,
  });
  if (!response.ok) throw new Error(await reason(response));
  const shown = item.querySelector(".text");
  let whole = false;
  for await (const event of events(response)) {
    if (event.error) throw new Error(event.error.message);
    const choice = event.choices[0];
    shown.textContent += choice.delta.content ?? "";
    if (choice.finish_reason) {
      whole = true;
      showDetails(item, event.nearfield, choice.finish_reason);
    }
    item.scrollIntoView({ block: "end" });
  }
  if (!whole) throw new Error("the connection ended before the answer did");
}

async function send() {
  const question = at("question").value.trim();
  if (!question || running) return;
  showError("");
  running = new AbortController();
  const mine = running;
  messages.push({ role: "user", content: question });
  const asked = add("user", question);
  const item = add("assistant", "");
  item.classList.add("waiting");
  item.setAttribute("aria-busy", "true");
  at("question").value = "";
  at("send").disabled = true;
  at("stop").hidden = false;
  at("status").textContent = "The model answers.";
  const shown = item.querySelector(".text");
  try {
    await answer(item);
    at("status").textContent = `Answer: ${shown.textContent}`;
  } catch (error) {
    if (error.name === "AbortError") {
      item.append(element("p", "facts", "stopped"));
      at("status").textContent = "Stopped.";
    } else {
      showError(error instanceof TypeError ? "the server cannot be reached" : error.message);
    }
  }
  item.classList.remove("waiting");
  item.removeAttribute("aria-busy");
  if (running === mine) {
    if (shown.textContent) {
      messages.push({ role: "assistant", content: shown.textContent });
    } else {
      // Nothing was answered: the question goes back to where it was typed.
      messages.pop();
      asked.remove();
      item.remove();
      at("question").value = question;
      at("empty").hidden = at("chat").children.length > 0;
    }
    running = null;
    at("send").disabled = false;
    at("stop").hidden = true;
    at("question").focus();
  }
}

function reset() {
  if (running) running.abort();
  running = null;
  messages.length = 0;
  at("chat").replaceChildren();
  at("empty").hidden = false;
  at("send").disabled = false;
  at("stop").hidden = true;
  showError("");
  at("question").focus();
}

async function start() {
  try {
    const [models, documents] = await Promise.all(
      ["/v1/models", "/v1/documents"].map(async (path) => {
        const response = await fetch(path);
        if (!response.ok) throw new Error(await reason(response));
        return response.json();
      }),
    );
    at("model").textContent = models.data[0].id;
    for (const one of documents.data) {
      const item = element("li", "", one.name);
      item.append(element("span", "", `${one.tokens.toLocaleString("en")} tokens`));
      at("documents").append(item);
    }
    if (documents.data.length) at("documents").dataset.some = "yes";
    else at("documents").append(element("li", "", "none; start the server with --document FILE"));
    at("room").textContent = `A chat has room for ${documents.room.toLocaleString("en")} tokens.`;
  } catch (error) {
    showError(error instanceof TypeError ? "the server cannot be reached" : error.message);
  }
}

at("form").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
at("question").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  }
});
at("stop").addEventListener("click", () => running && running.abort());
at("reset").addEventListener("click", reset);
start();
