// In the audio thread: the microphone at 16 kHz, in blocks of 20 ms of 16-bit samples.
const RATE = 16000, BLOCK = RATE / 50;

class Microphone extends AudioWorkletProcessor {
  block = new Int16Array(BLOCK);
  filled = 0;
  due = 0;
  sum = 0;
  count = 0;

  process([[samples]]) {
    for (const sample of samples ?? []) {
      // The mean of what lies between two samples of the lower rate.
      this.sum += sample;
      this.count += 1;
      this.due += RATE / sampleRate;
      if (this.due < 1) continue;
      this.due -= 1;
      const mean = this.sum / this.count;
      this.sum = this.count = 0;
      this.block[this.filled++] = Math.round(Math.max(-1, Math.min(1, mean)) * 32767);
      if (this.filled === BLOCK) {
        this.port.postMessage(this.block.slice());
        this.filled = 0;
      }
    }
    return true;
  }
}

registerProcessor("microphone", Microphone);
