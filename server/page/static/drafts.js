// The view of drafts: connects the form to answers, the race, the draft tree and the server's figures.

import { Answer, TreePanel, showLegend, showStats } from "./answer.js";
import * as api from "./api.js";
import { copy, download, find, make } from "./dom.js";
import { ServerView } from "./metrics.js";
import { Race } from "./race.js";
import { Run } from "./run.js";
import { complain, say, ServerState } from "./status.js";
import { keepTheme } from "./theme.js";

const form = find("form");
const fields = form.elements;
let current = null; // the run that is shown in the figures
let chart = null;
let answer = null; // its tokens on the page
let stopper = null; // an AbortController while something runs

const panel = new TreePanel(find("tree"), (run, step) => {
  for (const each of [answer, ...race.answers]) each?.mark(each.run === run ? step : null);
});
const select = (run, step, pinned) => panel.show(run, step, pinned);
const race = new Race(find("race"), select);
const server = new ServerState(loadModels);

// The request that the form describes.
function requestOf(prompt) {
  const number = (name) => (fields[name].value === "" ? undefined : Number(fields[name].value));
  const chat = fields.mode.value === "chat";
  const body = {
    model: fields.model.value,
    ...(chat ? { messages: [{ role: "user", content: prompt }] } : { prompt }),
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

// Shows a prompt and its answer.
function showAnswer(prompt, run) {
  const place = make("div", { class: "answer" });
  const article = make("article", {}, make("p", { class: "prompt" }, prompt), place);
  find("transcript").append(article);
  article.scrollIntoView({ block: "nearest" });
  answer = new Answer(place, run, select);
  current = run;
  for (const id of ["figures", "course"]) find(id).hidden = false;
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
    showLegend(find("legend"), [...current.acceptance], current.bonus);
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
    else complain(error);
    if (error.kind === "gone") server.look();
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
  const prompt = fields.prompt.value;
  clear();
  const run = new Run(requestOf(prompt));
  await busy(async (signal) => {
    say(server.state === "loading" ? "The server is loading its model; the answer follows." : "Answering.");
    await api.play(run, signal, () => {
      if (!run.events.length) return;
      if (current !== run) showAnswer(prompt, run);
      answer.render();
      showFigures();
    });
    if (!run.steps.length) say("Done. This server does not show its drafts, so the tokens have no colours.");
    else say(run.finish === "length" ? "Done: the answer reached the longest length." : "Done.");
  });
}

async function startRace() {
  if (!form.reportValidity()) return;
  const request = requestOf(fields.prompt.value);
  request.body.seed ??= crypto.getRandomValues(new Uint32Array(1))[0];
  panel.close();
  await busy(async (signal) => {
    say("Racing.");
    await race.start(request, signal);
    say("Done.");
  });
}

function clear() {
  answer = null;
  current = null;
  panel.close();
  find("transcript").replaceChildren();
  for (const id of ["figures", "course", "race"]) find(id).hidden = true;
}

async function loadRun(file) {
  try {
    const run = Run.load(await file.text());
    const { messages, prompt } = run.request.body;
    const last = Array.isArray(messages) ? messages[messages.length - 1]?.content : prompt;
    clear();
    showAnswer(typeof last === "string" ? last : "", run);
    answer.render();
    showFigures();
    say(run.error ? `Loaded a run that ended early: ${run.error}` : "Loaded.");
  } catch (error) {
    complain(error);
  }
}

async function loadModels() {
  try {
    const models = await api.models();
    fields.model.replaceChildren(...models.map(({ name }) => make("option", { value: name }, name)));
  } catch (error) {
    complain(error);
    if (error.kind === "key") openSettings();
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
find("start-race").addEventListener("click", () => !stopper && startRace());
find("stop").addEventListener("click", () => stopper?.abort());
find("new").addEventListener("click", () => !stopper && clear());
find("copy").addEventListener("click", async () => say(await copy(current.text)));
find("export").addEventListener("click", () => download("outrider-run.json", current.save()));
find("load").addEventListener("click", () => find("file").click());
find("file").addEventListener("change", (event) => {
  if (event.target.files.length) loadRun(event.target.files[0]);
  event.target.value = "";
});
new ServerView(find("server"));
const asked = location.hash === "#server" ? "server" : matchMedia("(min-width: 60rem)").matches && "settings";
if (asked) find(asked).open = true;
keepTheme();
