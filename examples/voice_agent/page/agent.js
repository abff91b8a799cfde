import { audioFrame, readFrame } from "./frames.js";

const RATE = 16000;
const button = document.getElementById("talk"), state = document.getElementById("state");

class Player {
  playing = new Set();
  until = 0;

  constructor(context) {
    this.context = context;
  }

  add(samples, rate) {
    const buffer = this.context.createBuffer(1, samples.length, rate);
    buffer.copyToChannel(Float32Array.from(samples, (sample) => sample / 32768), 0);
    const source = new AudioBufferSourceNode(this.context, { buffer });
    source.connect(this.context.destination);
    source.onended = () => this.playing.delete(source);
    this.playing.add(source);
    this.until = Math.max(this.until, this.context.currentTime);
    source.start(this.until);
    this.until += buffer.duration;
  }

  stop() {
    for (const source of this.playing) source.stop();
    this.until = 0;
  }
}

async function talk() {
  const context = new AudioContext();
  const stream = await navigator.mediaDevices.getUserMedia({ audio: { echoCancellation: true, noiseSuppression: true } });
  await context.audioWorklet.addModule("microphone.js");
  const port = new URLSearchParams(location.search).get("audio");
  const socket = new WebSocket(`ws://${location.hostname}:${port}`);
  socket.binaryType = "arraybuffer";
  const player = new Player(context);
  const microphone = new AudioWorkletNode(context, "microphone");
  microphone.port.onmessage = ({ data }) => {
    if (socket.readyState === WebSocket.OPEN) socket.send(audioFrame(data, RATE));
  };
  socket.onmessage = ({ data }) => {
    const frame = readFrame(new Uint8Array(data));
    if (frame.interrupted) player.stop();
    else if (frame.samples) player.add(frame.samples, frame.rate);
  };
  socket.onopen = () => {
    context.createMediaStreamSource(stream).connect(microphone);
    state.textContent = "Ask something. You may interrupt the answer.";
  };
  socket.onclose = ({ reason }) => {
    for (const track of stream.getTracks()) track.stop();
    context.close();
    button.disabled = false;
    state.textContent = reason || "The agent has left.";
  };
}

button.onclick = () => {
  button.disabled = true;
  talk().catch((error) => {
    button.disabled = false;
    state.textContent = String(error);
  });
};
