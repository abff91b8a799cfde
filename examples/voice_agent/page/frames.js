// Pipecat's protobuf frames, as far as the page needs them: Frame { audio = 2; interruption = 5 },
// AudioRawFrame { bytes audio = 3; uint32 sample_rate = 4; uint32 num_channels = 5 }.

const AUDIO = 2, INTERRUPTION = 5, SAMPLES = 3, RATE = 4, CHANNELS = 5;
const VARINT = 0, FIXED64 = 1, BYTES = 2, FIXED32 = 5;

function varint(value) {
  const bytes = [];
  for (; value > 127; value = Math.floor(value / 128)) bytes.push((value % 128) | 128);
  return [...bytes, value];
}

function sized(field, bytes) {
  const head = [...varint((field << 3) | BYTES), ...varint(bytes.length)];
  const whole = new Uint8Array(head.length + bytes.length);
  whole.set(head);
  whole.set(bytes, head.length);
  return whole;
}

// Samples (Int16Array, mono) as a message.
export function audioFrame(samples, rate) {
  const audio = sized(SAMPLES, new Uint8Array(samples.buffer, samples.byteOffset, samples.byteLength));
  const facts = [...varint((RATE << 3) | VARINT), ...varint(rate), ...varint((CHANNELS << 3) | VARINT), 1];
  const frame = new Uint8Array(audio.length + facts.length);
  frame.set(audio);
  frame.set(facts, audio.length);
  return sized(AUDIO, frame);
}

// [field, value] of each field of a message; a value is a number or a Uint8Array.
function* fields(bytes) {
  let place = 0;
  const number = () => {
    let value = 0, scale = 1, byte;
    do {
      byte = bytes[place++];
      value += (byte & 127) * scale;
      scale *= 128;
    } while (byte & 128);
    return value;
  };
  while (place < bytes.length) {
    const tag = number(), kind = tag & 7;
    if (kind === VARINT) {
      yield [tag >> 3, number()];
      continue;
    }
    const length = { [BYTES]: number, [FIXED32]: () => 4, [FIXED64]: () => 8 }[kind]();
    yield [tag >> 3, bytes.subarray(place, place + length)];
    place += length;
  }
}

// What a message says: { samples, rate }, { interrupted: true }, or {} for what the page does not know.
export function readFrame(bytes) {
  for (const [field, value] of fields(bytes)) {
    if (field === INTERRUPTION) return { interrupted: true };
    if (field === AUDIO) {
      const frame = Object.fromEntries(fields(value));
      // A copy: samples of two bytes need an even beginning.
      return { samples: new Int16Array(frame[SAMPLES].slice().buffer), rate: frame[RATE] };
    }
  }
  return {};
}
