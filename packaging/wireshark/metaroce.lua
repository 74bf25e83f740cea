-- Wireshark dissector for MetaRoCE (docs/protocol.md). Copy it into Wireshark's folder of personal Lua plugins, or
-- start `tshark -X lua_script:metaroce.lua`. The ports of the protocol (24575 to 25599) are a preference.
--
-- SPDX-License-Identifier: MIT OR Apache-2.0

local metaroce = Proto("metaroce", "MetaRoCE")

metaroce.prefs.ports = Pref.range("UDP ports", "24575-25599", "Receiving ports: base port and its slots", 65535)

local VERSION = 1
local TYPES = { [1] = "Data", [2] = "Control", [3] = "HELLO", [4] = "RESET", [5] = "Datagram" }
local OPCODES = { [0] = "Write", "WriteImm", "Send", "SendImm", "Read", "CompareSwap", "FetchAdd", "SendInv", "Nop",
	"AtomicWrite" }
local REFUSALS = { "RNR", "NOT_READY", "INVALID_REQUEST", "ACCESS", "OPERATION" }
local RESPONSES = { [0] = "Read", "Atomic" }
local SPACES = { [0] = "requests", "responses" }

-- Every field there is: { name, title, type, base, names of values, mask }.
local field = {}
local function define(name, title, kind, display, names, mask)
	field[name] = ProtoField.new(title, "metaroce." .. name, kind, names, display, mask)
end
local U8, U16, U32, U64, BYTES = ftypes.UINT8, ftypes.UINT16, ftypes.UINT32, ftypes.UINT64, ftypes.BYTES
define("version", "Version", U8, base.DEC, nil, 0xf0)
define("type", "Type", U8, base.DEC, TYPES, 0x0f)
define("ack_request", "Acknowledgement wanted at once", U8, base.DEC, nil, 0x01)
define("path", "Path", U8, base.DEC)
define("generation", "Generation", U8, base.DEC)
define("dcid", "Destination connection id", U64, base.HEX)
define("psn", "Path PSN", U32, base.DEC)
define("slot", "Sender's slot", U16, base.DEC)
define("backlog", "Backlog", U16, base.DEC, { [0] = "nothing", "waiting", [0xffff] = "hungry" })
define("ack.path", "Acknowledged path", U8, base.DEC)
define("ack.generation", "Its generation", U8, base.DEC)
define("ack.highest", "Highest PSN", U32, base.DEC)
define("ack.ce", "Packets with CE", U32, base.DEC)
define("ack.delay", "Delay, us", U16, base.DEC)
define("ack.sack", "Received (bit i of word i/64: highest - i)", BYTES, base.SPACE)
define("refuse.code", "Refused for", U8, base.DEC, REFUSALS)
define("refuse.number", "Receive index or message", U32, base.DEC)
define("refuse.timer", "RNR timer code", U8, base.DEC)
define("credit.limit", "First receive not posted", U32, base.DEC)
define("hint.epoch", "Epoch", U8, base.DEC)
define("hint.rate", "Rate", U16, base.HEX)
define("hint.budget", "Budget, bytes", U32, base.DEC)
define("planes.epoch", "Epoch", U8, base.DEC)
define("planes.down", "Planes down", U16, base.HEX)
define("opcode", "Operation", U8, base.DEC, OPCODES, 0x3f)
define("solicited", "Solicited", U8, base.DEC, nil, 0x80)
define("for_srq", "Names an SRQ", U8, base.DEC, nil, 0x40)
define("response", "Response to", U8, base.DEC, RESPONSES)
define("length", "Payload, bytes", U16, base.DEC)
define("dst_qpn", "Destination QP", U32, base.HEX)
define("src_qpn", "Source QP", U32, base.HEX)
define("stream", "Stream", U32, base.DEC)
define("cpn", "Connection packet number", U32, base.DEC)
define("units", "Numbers covered", U16, base.DEC)
define("attempt", "Attempt", U16, base.DEC)
define("msn", "Message", U32, base.DEC)
define("total", "Message, bytes", U32, base.DEC)
define("offset", "Offset", U32, base.DEC)
define("recv_index", "Receive index", U32, base.DEC)
define("srq", "SRQ", U32, base.DEC)
define("raddr", "Remote address", U64, base.HEX)
define("rkey", "Remote key", U32, base.HEX)
define("imm", "Immediate, or key to invalidate", U32, base.HEX)
define("compare_add", "Compare or add", U64, base.HEX)
define("swap", "Swap", U64, base.HEX)
define("payload", "Payload", BYTES, base.NONE)
define("void.space", "Space", U8, base.DEC, SPACES)
define("void.confirms", "Confirms refusals", U16, base.HEX)
define("qkey", "Q_Key", U32, base.HEX)
define("group", "Group", ftypes.IPv6, base.NONE)
define("datagram.flags", "Flags (1 immediate, 2 solicited, 4 group)", U8, base.HEX)
define("hello.answer", "Answer wanted", U32, base.DEC)
define("hello.incarnation", "Incarnation", U64, base.HEX)
define("hello.scid", "Sender's connection id", U64, base.HEX)
define("hello.bound", "Bound to", U64, base.HEX)
define("hello.ordinal", "Ordinal", U32, base.DEC)
define("hello.segment", "Segment, bytes", U16, base.DEC)
define("hello.unit", "Unit of packet numbers, bytes", U16, base.DEC)
define("hello.budget", "Budget, bytes", U32, base.DEC)
define("hello.messages", "Message window", U16, base.DEC)
define("hello.paths", "Paths", U8, base.DEC)
define("hello.first_request", "First number of requests", U32, base.DEC)
define("hello.first_response", "First number of responses", U32, base.DEC)
define("hello.features", "Features (1 hints, 2 planes)", U32, base.HEX)
define("hello.label", "Plane", ftypes.STRING, base.ASCII)
define("hello.address", "Address", ftypes.IPv6, base.NONE)

local all = {}
for _, one in pairs(field) do all[#all + 1] = one end
metaroce.fields = all
local broken = ProtoExpert.new("metaroce.broken", "Malformed", expert.group.MALFORMED, expert.severity.ERROR)
metaroce.experts = { broken }

-- Adds fields that lie one behind the other: { name, bytes }, without a name for what is skipped. Gives the end.
local function fields(tree, buffer, at, list)
	for _, entry in ipairs(list) do
		if entry[1] then tree:add(field[entry[1]], buffer(at, entry[2])) end
		at = at + entry[2]
	end
	return at
end

local function payload(tree, buffer, at, length)
	if length > 0 then tree:add(field.payload, buffer(at, length)) end
	return at + length
end

-- What follows the type byte of each frame: a function that adds the fields behind `at` and gives the frame's end and
-- its words for the column.
local frames = {}

frames[0x01] = { "ACK", function(tree, b, at)
	local to = fields(tree, b, at, { { nil, 1 }, { "ack.path", 1 }, { "ack.generation", 1 }, { nil, 1 },
		{ "ack.highest", 4 }, { "ack.ce", 4 }, { "ack.delay", 2 }, { nil, 2 }, { "ack.sack", 32 } })
	return to, string.format("ACK path %d to %d", b(at + 1, 1):uint(), b(at + 4, 4):uint())
end }
frames[0x02] = { "REFUSE", function(tree, b, at)
	local to = fields(tree, b, at, { { nil, 1 }, { "refuse.code", 1 }, { "attempt", 2 }, { "dst_qpn", 4 },
		{ "stream", 4 }, { "refuse.number", 4 }, { "refuse.timer", 1 }, { nil, 3 } })
	return to, "REFUSE " .. (REFUSALS[b(at + 1, 1):uint()] or "?")
end }
frames[0x03] = { "CREDIT", function(tree, b, at)
	return fields(tree, b, at, { { nil, 4 }, { "dst_qpn", 4 }, { "stream", 4 }, { "credit.limit", 4 } }), "CREDIT"
end }
frames[0x04] = { "HINT", function(tree, b, at)
	return fields(tree, b, at, { { nil, 1 }, { "hint.epoch", 1 }, { "hint.rate", 2 }, { "hint.budget", 4 } }), "HINT"
end }
frames[0x05] = { "PLANES", function(tree, b, at)
	return fields(tree, b, at, { { nil, 1 }, { "planes.epoch", 1 }, { "planes.down", 2 } }), "PLANES"
end }
frames[0x06] = { "CLOSE", function(_, _, at) return at + 4, "CLOSE" end }
frames[0x07] = { "CLOSE_ACK", function(_, _, at) return at + 4, "CLOSE_ACK" end }
frames[0x08] = { "PING", function(_, _, at) return at + 4, "PING" end }

frames[0x10] = { "REQUEST", function(tree, b, at)
	local op, length = b(at + 1, 1):uint(), b(at + 2, 2):uint()
	local code = op % 64
	tree:add(field.solicited, b(at + 1, 1))
	tree:add(field.for_srq, b(at + 1, 1))
	local to = fields(tree, b, at, { { nil, 1 }, { "opcode", 1 }, { "length", 2 }, { "dst_qpn", 4 }, { "src_qpn", 4 },
		{ "stream", 4 }, { "cpn", 4 }, { "units", 2 }, { "attempt", 2 }, { "msn", 4 }, { "total", 4 },
		{ "offset", 4 }, { "recv_index", 4 } })
	if op % 128 >= 64 then to = fields(tree, b, to, { { "srq", 4 } }) end
	if code == 0 or code == 1 or code == 4 or code == 5 or code == 6 or code == 9 then
		to = fields(tree, b, to, { { "raddr", 8 }, { "rkey", 4 } })
	end
	if code == 1 or code == 3 or code == 7 then to = fields(tree, b, to, { { "imm", 4 } }) end
	if code == 5 or code == 6 then to = fields(tree, b, to, { { "compare_add", 8 }, { "swap", 8 } }) end
	local words = string.format("%s cpn %d msn %d %d/%d", OPCODES[code] or "?", b(at + 16, 4):uint(),
		b(at + 24, 4):uint(), b(at + 32, 4):uint() + length, b(at + 28, 4):uint())
	return payload(tree, b, to, length), words
end }
frames[0x11] = { "RESPONSE", function(tree, b, at)
	local length = b(at + 2, 2):uint()
	local to = fields(tree, b, at, { { nil, 1 }, { "response", 1 }, { "length", 2 }, { "dst_qpn", 4 }, { "stream", 4 },
		{ "cpn", 4 }, { "units", 2 }, { "attempt", 2 }, { "msn", 4 }, { "offset", 4 }, { "total", 4 } })
	local words = string.format("Response cpn %d msn %d %d/%d", b(at + 12, 4):uint(), b(at + 20, 4):uint(),
		b(at + 24, 4):uint() + length, b(at + 28, 4):uint())
	return payload(tree, b, to, length), words
end }
frames[0x12] = { "VOID", function(tree, b, at)
	local to = fields(tree, b, at, { { nil, 1 }, { "void.space", 1 }, { "units", 2 }, { "cpn", 4 }, { "src_qpn", 4 },
		{ "stream", 4 }, { "attempt", 2 }, { "void.confirms", 2 } })
	return to, "VOID cpn " .. b(at + 4, 4):uint()
end }

local function dissect_frames(tree, buffer, at, words)
	while at < buffer:len() do
		local kind = buffer(at, 1):uint()
		if kind == 0 then return end
		local frame = frames[kind]
		if not frame then error("unknown frame " .. kind) end
		local sub = tree:add(metaroce, buffer(at), frame[1])
		local to, word = frame[2](sub, buffer, at)
		if to > buffer:len() then error("frame is cut") end
		sub:set_len(to - at)
		words[#words + 1] = word
		at = to
	end
end

local function dissect_hello(tree, buffer, at)
	at = fields(tree, buffer, at, { { "hello.answer", 4 }, { "hello.incarnation", 8 }, { "hello.scid", 8 },
		{ "hello.bound", 8 }, { "hello.ordinal", 4 } })
	while buffer(at, 1):uint() ~= 0 do
		local kind, length = buffer(at, 1):uint(), buffer(at + 1, 2):uint()
		local body = at + 3
		if kind == 1 then
			fields(tree, buffer, body, { { "hello.segment", 2 }, { "hello.unit", 2 }, { "hello.budget", 4 },
				{ "hello.messages", 2 }, { "hello.paths", 1 }, { nil, 1 }, { "hello.first_request", 4 },
				{ "hello.first_response", 4 }, { "hello.features", 4 } })
		elseif kind == 2 then
			local label = buffer(body, 1):uint()
			local sub = tree:add(field["hello.label"], buffer(body + 1, label))
			for i = 0, buffer(body + 1 + label, 1):uint() - 1 do
				sub:add(field["hello.address"], buffer(body + 2 + label + 16 * i, 16))
			end
		end
		at = body + length
	end
end

local function dissect_datagram(tree, buffer, at)
	local flags, length = buffer(at, 1):uint(), buffer(at + 2, 2):uint()
	at = fields(tree, buffer, at, { { "datagram.flags", 1 }, { nil, 1 }, { "length", 2 }, { "dst_qpn", 4 },
		{ "src_qpn", 4 }, { "qkey", 4 }, { "imm", 4 } })
	if flags % 8 >= 4 then at = fields(tree, buffer, at, { { "group", 16 } }) end
	payload(tree, buffer, at, length)
end

function metaroce.dissector(buffer, pinfo, root)
	if buffer:len() < 20 or math.floor(buffer(0, 1):uint() / 16) ~= VERSION then return 0 end
	local kind = buffer(0, 1):uint() % 16
	if not TYPES[kind] then return 0 end
	pinfo.cols.protocol = "MetaRoCE"
	local tree = root:add(metaroce, buffer())
	tree:add(field.version, buffer(0, 1))
	tree:add(field.type, buffer(0, 1))
	fields(tree, buffer, 1, { { "ack_request", 1 }, { "path", 1 }, { "generation", 1 }, { "dcid", 8 }, { "psn", 4 },
		{ "slot", 2 }, { "backlog", 2 } })
	local words = { string.format("%s path %d.%d", TYPES[kind], buffer(2, 1):uint(), buffer(3, 1):uint()) }
	if kind == 1 then words[1] = words[1] .. " psn " .. buffer(12, 4):uint() end
	local whole, reason = pcall(function()
		if kind <= 2 then dissect_frames(tree, buffer, 20, words)
		elseif kind == 3 then dissect_hello(tree, buffer, 20)
		elseif kind == 5 then dissect_datagram(tree, buffer, 20) end
	end)
	if not whole then
		tree:add_proto_expert_info(broken, "Malformed: " .. tostring(reason))
		words[#words + 1] = "[malformed]"
	end
	pinfo.cols.info = table.concat(words, ", ")
	return buffer:len()
end

local udp = DissectorTable.get("udp.port")
local registered
local function register()
	if registered then udp:remove(registered, metaroce) end
	registered = metaroce.prefs.ports
	udp:add(registered, metaroce)
end
metaroce.prefs_changed = register
register()
