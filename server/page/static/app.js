// The playground: connects the form to answers, the race, the draft tree and the server's figures.

import { Answer, TreePanel, showLegend, showStats } from "./answer.js";
import * as api from "./api.js";
import { find, make } from "./dom.js";
import { show as showMetrics } from "./metrics.js";
import { Pictures, shown, textOf } from "./pictures.js";
import { Race } from "./race.js";
import { Run } from "./run.js";

const READY_MS = 5000; // between looks at the server's state; shorter while it cannot answer
const WAIT_MS = 1000;
const form = find("form");
const fields = form.elements;
let turns = []; // of the chat: {text, run}
let current = null; // the run that is shown in the figures
let chart = null;
let answers = []; // everything with tokens on the page
let stopper = null; // an AbortController while something runs
let state = "";
const seeing = new Set(); // the names of models that read pictures

const panel = new TreePanel(find("tree"), (run, step) => {
  for (const answer of [...answers, ...race.answers]) answer.mark(answer.run === run ? step : null);
});
const select = (run, step, pinned) => panel.show(run, step, pinned);
const race = new Race(find("race"), select);
const pictures = new Pictures(fields.prompt, find("pictures"), () => {
  const accepted = fields.mode.value === "chat" && seeing.has(fields.model.value);
  if (!accepted) say("The picture was left out: it needs a chat with a model that reads pictures.", "problem");
  return accepted;
});

function say(words, kind = "") {
  find("words").textContent = words;
  find("words").className = kind;
}

// The request that the form describes. `messages` are the chat so far.
function requestOf(content, messages) {
  const number = (name) => (fields[name].value === "" ? undefined : Number(fields[name].value));
  const chat = fields.mode.value === "chat";
  const body = {
    model: fields.model.value,
    ...(chat ? { messages: [...messages, { role: "user", content }] } : { prompt: textOf(content) }),
    max_tokens: number("max_tokens"),
    temperature: number("temperature"),
    seed: number("seed"),
    session_id: fields.session.value || undefined,
    prediction: fields.prediction.value ? { type: "content", content: fields.prediction.value } : undefined,
    stream: true,
    speculation: { trace: true, drafter: fields.drafter.value || undefined, max_nodes: number("max_nodes") },
  };
  return { path: chat ? "v1/chat/completions" : "v1/completions", body: JSON.parse(JSON.stringify(body)) };
}

function messagesSoFar() {
  return turns.flatMap(({ content, run }) => [
    { role: "user", content },
    { role: "assistant", content: run.content },
  ]);
}

// Adds a prompt and its answer to the page.
function addTurn(content, run) {
  const place = make("div", { class: "answer" });
  const seen = make("div", { class: "pictures" }, ...shown(content));
  const turn = make("article", {}, seen, make("p", { class: "prompt" }, textOf(content)), place);
  find("transcript").append(turn);
  turn.scrollIntoView({ block: "nearest" });
  const answer = new Answer(place, run, select);
  answers.push(answer);
  current = run;
  for (const id of ["figures", "course"]) find(id).hidden = false;
  return answer;
}

async function showChart() {
  try {
    const { Chart } = await import("./chart.js");
    chart ??= new Chart(find("chart"));
  } catch {
    return; // the server has gone meanwhile, which the answer says
  }
  if (current) chart.render(current);
}

let drawing = false;
function showFigures() {
  if (drawing) return;
  drawing = true;
  requestAnimationFrame(() => {
    drawing = false;
    if (!current) return; // cleared since
    showStats(find("stats"), current);
    showLegend(find("legend"), current);
    showChart();
  });
}

function lock(locked) {
  document.body.classList.toggle("busy", locked);
  for (const field of [...fields.mode, ...["run", "start-race", "load"].map(find)]) field.disabled = locked;
  find("stop").disabled = !locked;
}

// Runs `work` with the form locked, and says how it ended.
async function busy(work) {
  stopper = new AbortController();
  lock(true);
  try {
    await work(stopper.signal);
  } catch (error) {
    if (error.name === "AbortError") say("Stopped.");
    else say(error.message, "problem");
    if (error.kind === "gone") look();
    if (error.kind === "key") openSettings();
  } finally {
    stopper = null;
    lock(false);
  }
}

function openSettings() {
  find("settings").open = true;
  fields.key.focus();
}

async function answerPrompt() {
  const content = pictures.content(fields.prompt.value);
  if (fields.mode.value !== "chat") clear();
  find("race").hidden = true;
  const run = new Run(requestOf(content, messagesSoFar()));
  await busy(async (signal) => {
    say(state === "loading" ? "The server is loading its model; the answer follows." : "Answering.");
    let answer = null;
    try {
      await api.play(run, signal, () => {
        if (!run.events.length) return;
        answer ??= addTurn(content, run);
        answer.render();
        showFigures();
      });
    } finally {
      if (answer && answers.includes(answer)) {
        turns.push({ content, run });
        if (fields.mode.value === "chat") {
          fields.prompt.value = "";
          pictures.clear();
        }
      }
    }
    if (!run.steps.length) say("Done. This server does not show its drafts, so the tokens have no colours.");
    else say(run.finish === "length" ? "Done: the answer reached the longest length." : "Done.");
  });
}

async function startRace() {
  if (!form.reportValidity()) return;
  const request = requestOf(pictures.content(fields.prompt.value), []);
  request.body.seed ??= crypto.getRandomValues(new Uint32Array(1))[0];
  panel.close();
  await busy(async (signal) => {
    say("Racing.");
    await race.start(request, signal);
    say("Done.");
  });
}

function clear() {
  turns = [];
  answers = [];
  current = null;
  panel.close();
  find("transcript").replaceChildren();
  for (const id of ["figures", "course", "race"]) find(id).hidden = true;
}

async function copy() {
  if (!navigator.clipboard) say("Browsers copy only on https and localhost; select the text instead.", "problem");
  else {
    await navigator.clipboard.writeText(current.text).then(
      () => say("Copied."),
      () => say("The browser refused to copy; select the text instead.", "problem"),
    );
  }
}

function exportRun() {
  const link = make("a", { download: "outrider-run.json" });
  link.href = URL.createObjectURL(new Blob([current.save()], { type: "application/json" }));
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href));
}

async function loadRun(file) {
  try {
    const run = Run.load(await file.text());
    const { messages, prompt } = run.request.body;
    const last = Array.isArray(messages) ? messages[messages.length - 1]?.content : prompt;
    clear();
    addTurn(typeof last === "string" ? last : "", run).render();
    showFigures();
    say(run.error ? `Loaded a run that ended early: ${run.error}` : "Loaded.");
  } catch (error) {
    say(error.message, "problem");
  }
}

// Looks at the server's state, says it, and looks again.
let timer = null;
async function look() {
  clearTimeout(timer);
  const seen = await api.status();
  find("state").textContent = seen.words;
  if (seen.state !== state) {
    const changed = state !== "";
    state = seen.state;
    find("state").dataset.state = state;
    if (state === "ready") loadModels();
    const known = find("words").className === "problem"; // an answer that has failed says more
    if (changed && state === "gone" && !known) say("The server is gone: nothing answers. Start it again.", "problem");
    if (changed && state === "ready") say("The server is ready.");
  }
  if (!document.hidden) timer = setTimeout(look, state === "ready" ? READY_MS : WAIT_MS);
}

async function loadModels() {
  try {
    const models = await api.models();
    fields.model.replaceChildren(...models.map(({ name }) => make("option", { value: name }, name)));
    for (const { name, sees } of models) if (sees) seeing.add(name);
  } catch (error) {
    say(error.message, "problem");
    if (error.kind === "key") openSettings();
  }
}

async function refreshMetrics() {
  try {
    showMetrics(find("metrics"), await api.metrics());
  } catch (error) {
    say(error.message, "problem");
  }
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  if (!stopper) answerPrompt();
});
form.addEventListener("invalid", () => (find("settings").open = true), true); // so that the browser can point at the field
fields.prompt.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
});
fields.key.addEventListener("change", () => {
  api.setKey(fields.key.value);
  say("");
  loadModels();
});
for (const mode of fields.mode) mode.addEventListener("change", clear);
document.addEventListener("keydown", (event) => event.key === "Escape" && !find("tree").hidden && panel.close());
document.addEventListener("visibilitychange", () => document.hidden || look());
find("start-race").addEventListener("click", () => !stopper && startRace());
find("stop").addEventListener("click", () => stopper?.abort());
find("new").addEventListener("click", () => !stopper && clear());
find("copy").addEventListener("click", copy);
find("export").addEventListener("click", exportRun);
find("load").addEventListener("click", () => find("file").click());
find("file").addEventListener("change", (event) => {
  if (event.target.files.length) loadRun(event.target.files[0]);
  event.target.value = "";
});
find("server").addEventListener("toggle", () => find("server").open && refreshMetrics());
find("refresh").addEventListener("click", refreshMetrics);
if (matchMedia("(min-width: 60rem)").matches) find("settings").open = true;
look();
