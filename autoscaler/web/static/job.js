// One job's page: its numbers over time, why it has what it has, its output, and what a person asks of it.
import { chart } from "./charts.js";
import { ago, element, eventItem, number, percent, progressText, setText } from "./format.js";

const $ = (id) => document.getElementById(id);
const MOST_LINES = 2000;
const EVERY = 2000; // milliseconds between two looks at what does not come with the stream

export class JobPage {
  constructor({ request, confirm }) {
    this.request = request;
    this.confirm = confirm;
    this.name = null;
    this.busy = false;
    this.again = false;
    this.offsets = null; // of the output; null: it is not shown
    this.lines = [];
    $("scale-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.act("scale", { replicas: Number($("scale-count").value) });
    });
    $("scale-auto").addEventListener("click", () => this.act("scale", { replicas: null }));
    $("stop-button").addEventListener("click", () => this.end("stop", "Stop", "It saves its state and ends; the same command goes on."));
    $("cancel-button").addEventListener("click", () => this.end("cancel", "Cancel", "It ends, or leaves the queue; its checkpoints stay."));
    $("resume-button").addEventListener("click", () => this.act("resume", {}));
    $("output-button").addEventListener("click", () => this.toggleOutput());
    $("rank").addEventListener("change", () => this.restartOutput());
    setInterval(() => this.name !== null && this.refresh(), EVERY);
  }

  open(name) {
    if (name === this.name) return;
    this.name = name;
    this.hideOutput();
    for (const id of ["job-warnings", "job-facts", "charts", "explain", "job-events"]) $(id).replaceChildren();
    for (const id of ["job-reason", "action-result", "job-state"]) setText($(id), "");
    for (const id of ["scale-form", "stop-button", "cancel-button", "resume-button"]) $(id).hidden = true;
    $("scale-count").value = "";
    if (name === null) return;
    setText($("job-heading"), name);
    this.explained = 0;
    this.generation = undefined;
    this.refresh();
  }

  path(what = "") {
    return `/api/jobs/${encodeURIComponent(this.name)}${what}`;
  }

  async refresh() {
    if (this.busy) {
      this.again = true;
      return;
    }
    this.busy = true;
    const name = this.name;
    try {
      const answer = await fetch(this.path());
      const found = await answer.json();
      if (name === this.name) {
        if (answer.ok) this.draw(found);
        else setText($("job-reason"), found.error);
      }
      if (name === this.name && this.offsets !== null) await this.moreOutput();
    } catch {
      // the server is away; the stream says so, and the next look tries again
    } finally {
      this.busy = false;
      if (this.again && this.name !== null) {
        this.again = false;
        setTimeout(() => this.refresh(), 250);
      }
    }
  }

  draw(job) {
    setText($("job-state"), job.state);
    $("job-state").className = `state ${job.state}`;
    setText($("job-reason"), job.reason);
    $("scale-form").hidden = !job.can.scale;
    $("stop-button").hidden = !job.can.stop;
    $("cancel-button").hidden = !job.can.cancel;
    $("resume-button").hidden = !job.can.resume;
    $("rank-field").hidden = $("output-button").hidden = !job.can.logs;
    if (!job.can.logs) this.say("Its replicas write to the terminal of adaptdl-run, and to --log-dir.");
    if (job.bounds) {
      [$("scale-count").min, $("scale-count").max] = job.bounds;
      if ($("scale-count").value === "") $("scale-count").value = job.asked ?? (job.replicas || job.bounds[0]);
    }
    const warnings = [...job.warnings, ...job.failures];
    $("job-warnings").replaceChildren(...warnings.map((text) => element("li", {}, text)));
    this.facts(job);
    this.charts(job);
    const events = job.events.slice(-60).reverse();
    $("job-events").replaceChildren(...events.map((event) => eventItem(event, false)));
    if (Date.now() - this.explained > 5 * EVERY || this.generation !== job.generation) this.explain();
    this.generation = job.generation;
  }

  facts(job) {
    const places = Object.entries(job.placements).map(([node, count]) => `${node}:${count}`).join(" ");
    const pauses = job.pauses.map((seconds) => `${number(seconds)} s`).join(", ");
    const facts = [
      ["Replicas", `${job.replicas || "none"}${places ? ` (${places})` : ""}${job.asked ? `, ${job.asked} asked for` : ""}`],
      ["Batch", job.batch_size === null ? "–" : `${number(job.batch_size)} samples, ${number(job.atomic_bsz)} per pass`],
      ["Learning rate", job.lr_factor === null ? "–" : `× ${number(job.lr_factor)}`],
      [
        "Goodput",
        job.goodput === null ? "–" : `${number(job.goodput)}/s, predicted ${number(job.predicted_goodput)}/s`,
      ],
      ["Efficiency", percent(job.efficiency)],
      ["Progress", progressText(job) || "–"],
      ["Last pauses", pauses || "none yet"],
      ["Restarts", `${job.restarts_used} of ${job.max_restarts ?? "–"}`],
      ["Checkpoint", job.checkpoint ?? "none yet"],
      ["Since", `${ago(job.started ?? job.created)}${job.owner ? `, by ${job.owner}` : ""}`],
      ["Command", job.command.join(" ") || "–"],
    ];
    if (job.can.logs) {
      const link = { href: job.tensorboard, target: "_blank", rel: "noreferrer" };
      facts.push(["TensorBoard", job.tensorboard ? element("a", link, job.tensorboard) : `adaptdl tensorboard ${this.name}`]);
    }
    if (job.cost) facts.push(["Cost", `${number(job.cost.so_far)} so far, ${number(job.cost.hourly)} an hour`]);
    $("job-facts").replaceChildren(
      ...facts.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value))),
    );
  }

  charts(job) {
    const until = Date.now() / 1000;
    const line = (name, points) => ({ name, points: points ?? [] });
    const replicas = job.allocations.map((plan) => [plan.time, plan.replicas]);
    const curves = job.curves;
    const made = [
      chart({ title: "Replicas", lines: [line("replicas", replicas)], steps: true, fromZero: true, until: job.ended ?? until }),
      chart({
        title: "Goodput, samples per second",
        lines: [line("measured", curves.goodput), line("predicted", curves.predicted_goodput)],
        fromZero: true,
      }),
      chart({ title: "Batch size", unit: "samples", lines: [line("batch size", curves.batch_size)], steps: true }),
      chart({ title: "Learning rate, times the script's", lines: [line("factor", curves.lr_factor)], steps: true }),
      chart({ title: "Gradient noise: the critical batch size", unit: "samples", lines: [line("noise", curves.noise)] }),
      ...Object.keys(curves)
        .filter((name) => name.startsWith("reported "))
        .map((name) => chart({ title: name.slice(9), lines: [line(name, curves[name])] })),
    ];
    $("charts").replaceChildren(...made.filter(Boolean));
  }

  async explain() {
    this.explained = Date.now();
    const name = this.name;
    const answer = await fetch(this.path("/explain"));
    const found = await answer.json();
    if (name !== this.name) return;
    const lines = answer.ok ? found : [found.error];
    $("explain").replaceChildren(...lines.map((text) => element("li", {}, text)));
  }

  // Requests

  async act(what, body) {
    setText($("action-result"), "…");
    const answer = await fetch(this.path(`/${what}`), {
      method: "POST",
      headers: { "Content-Type": "application/json", "X-Adaptdl-Request": this.request() },
      body: JSON.stringify(body),
    });
    const said = await answer.json();
    setText($("action-result"), answer.ok ? said.done : `Not done: ${said.error}`);
    this.refresh();
  }

  async end(what, button, meaning) {
    if (await this.confirm(`${button} ${this.name}? ${meaning}`, button)) this.act(what, {});
  }

  // Output

  toggleOutput() {
    if (this.offsets === null) this.restartOutput(true);
    else this.hideOutput();
  }

  restartOutput(open = this.offsets !== null) {
    if (!open) return;
    this.offsets = {};
    this.lines = [];
    $("output").hidden = false;
    setText($("output"), "…");
    setText($("output-button"), "Hide");
    $("output-button").setAttribute("aria-expanded", "true");
    this.refresh();
  }

  hideOutput() {
    this.offsets = null;
    $("output").hidden = true;
    setText($("output-button"), "Show");
    $("output-button").setAttribute("aria-expanded", "false");
  }

  say(text) {
    $("output").hidden = false;
    setText($("output"), text);
  }

  async moreOutput() {
    const query = new URLSearchParams({ offsets: JSON.stringify(this.offsets), rank: $("rank").value });
    const answer = await fetch(this.path(`/output?${query}`));
    const found = await answer.json();
    if (this.offsets === null) return;
    if (!answer.ok) {
      this.say(found.error);
      return;
    }
    this.offsets = found.offsets;
    this.lines = [...this.lines, ...found.lines].slice(-MOST_LINES);
    const box = $("output");
    const atEnd = box.scrollTop + box.clientHeight >= box.scrollHeight - 30;
    setText(box, [...this.lines, ...found.problems].join("\n") || "nothing yet");
    if (atEnd) box.scrollTop = box.scrollHeight;
  }
}
